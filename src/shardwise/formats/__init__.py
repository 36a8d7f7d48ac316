"""Foreign checkpoints: read where they lie, as manifests laid over their files; and written."""
