"""Turn the objects of frameworks into named tensors and values, and load them back."""

from shardwise.adapters.bind import bind_state, names_to_fill, optimizer_names, torch_optimizers_in
from shardwise.adapters.binding import Binding
from shardwise.adapters.tensors import make_leaves_fillable

__all__ = [
    "Binding",
    "bind_state",
    "make_leaves_fillable",
    "names_to_fill",
    "optimizer_names",
    "torch_optimizers_in",
]
