"""Framework objects to named leaves and back. Only here are frameworks known."""

from shardwise.adapters.bind import asked_of, bind_state, optimizer_names, optimizers_in
from shardwise.adapters.binding import Binding
from shardwise.adapters.tensors import fillable_leaves

__all__ = [
    "Binding",
    "asked_of",
    "bind_state",
    "fillable_leaves",
    "optimizer_names",
    "optimizers_in",
]
