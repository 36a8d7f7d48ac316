"""Checkpoints of other frameworks, read in place."""
