"""Copies and parity (XOR, Reed–Solomon) that protect snapshots; arithmetic only."""
