"""The process of a node that outlives its trainers: seals, protects, persists, serves."""
