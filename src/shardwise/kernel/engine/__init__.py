"""Bytes in motion: buffers, reads and writes under a budget, agreement between ranks, commit."""
