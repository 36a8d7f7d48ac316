"""Reads that ranks share: one rank reads from storage what several ranks need."""
