"""Names without the traces that wrappers leave in them."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_MARKS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or DataParallel."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


def clean_name(root: nn.Module, path: str) -> str:
    """A path below `root` as the unwrapped model would have it.

    Left out are the marks of torch.compile, activation checkpointing and FSDP, and `module` where
    a data-parallel wrapper put it.
    """
    kept = []
    here: object = root
    for part in path.split("."):
        wrapper = isinstance(here, (DataParallel, DistributedDataParallel)) and part == "module"
        if part not in _MARKS and not wrapper:
            kept.append(part)
        here = getattr(here, part, None)
    return ".".join(kept)
