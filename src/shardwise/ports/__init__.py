"""The interfaces by which other packages extend shardwise: one module for each."""
