"""What other nodes hold: asked for, read, put together, decoded; all through their agents."""
