"""From arrays and values to the names and pieces of a `Foreign`; for all readers."""
