"""Quantized tensors: small numbers that have a meaning only with their scales."""
