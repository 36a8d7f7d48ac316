"""The format, version 1: values to bytes and back, without I/O. See docs/format.md."""
