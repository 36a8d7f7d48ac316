"""A state dict as named leaves: tensors, plain values without pickle, randomness."""
