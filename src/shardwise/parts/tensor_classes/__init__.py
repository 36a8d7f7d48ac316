"""Save and load tensors that wrap others, such as the quantized tensors of torchao."""
