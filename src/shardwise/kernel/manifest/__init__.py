"""The checkpoint format, version 1, as values and bytes, without I/O. See docs/format.md."""
