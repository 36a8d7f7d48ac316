"""Connect the ranks of a job: a tree of sockets, over which they exchange messages."""
