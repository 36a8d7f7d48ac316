"""Readers of foreign formats. Each has `recognise` and `read`."""
