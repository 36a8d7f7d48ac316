"""The process of a node that outlives the trainers: it seals, protects, persists and serves."""
