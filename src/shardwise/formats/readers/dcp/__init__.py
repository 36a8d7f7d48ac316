"""PyTorch's distributed checkpoints, and what all formats built on them share."""
