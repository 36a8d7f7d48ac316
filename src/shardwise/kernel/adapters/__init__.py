"""Turn the objects of frameworks into named tensors and values, and load them back."""

from shardwise.kernel.adapters.bind import bind_state, local_state_of, torch_optimizers_in

__all__ = ["bind_state", "local_state_of", "torch_optimizers_in"]
