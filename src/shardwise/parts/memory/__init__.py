"""Snapshots in the memory of the nodes: stages, protection, recovery, and the agents."""
