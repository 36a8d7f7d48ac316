"""Drop-ins for frameworks that save and load checkpoints. Each module imports its framework."""
