"""Writes a checkpoint in another format, or again in shardwise's own, with bounded memory."""
