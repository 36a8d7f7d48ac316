"""Two tiers of storage: the root of a run, and a mirror that has copies of its checkpoints."""
