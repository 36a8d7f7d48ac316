"""What keeps a snapshot when nodes are lost: copies, parity, Reed-Solomon; arithmetic only."""
