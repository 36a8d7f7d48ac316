"""PyTorch Distributed Checkpoint (DCP), and code shared by formats that are built on it."""
