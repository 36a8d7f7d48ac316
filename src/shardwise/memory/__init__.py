"""Snapshots in the memory of the nodes: staged, guarded, served, and recovered from."""
