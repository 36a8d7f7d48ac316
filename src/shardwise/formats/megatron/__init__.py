"""Checkpoints of Megatron-Core."""
