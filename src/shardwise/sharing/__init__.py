"""Reads that ranks share: what several ranks need is read from storage by one of them."""
