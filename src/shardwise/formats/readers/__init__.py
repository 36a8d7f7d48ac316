"""Formats: each recognises a place, and reads it as a `Foreign`."""
