"""Readers of two formats that nobody writes any more, in a package outside of shardwise.

`megatron` reads the legacy checkpoints of Megatron-LM, and `torchsnapshot` those of torchsnapshot.
shardwise finds them by the entry points in pyproject.toml. They use the port of readers
(docs/ports/reader.md of shardwise) and public names only.
"""
