"""Notice replicas that differ: the ranks that hold a box compare a part of it at each save."""
