"""What a trainer does: stage its share, follow what becomes of it, find it again."""
