"""The checkpoints of one run: saved at intervals, kept by rules, restored."""
