"""What every save and load of shardwise's own format needs. It imports no part."""
