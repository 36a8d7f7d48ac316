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


class CleanNames:
    """Paths below `root` as the unwrapped model would have them.

    Left out are the marks of torch.compile, activation checkpointing and FSDP, and `module` where
    a data-parallel wrapper put it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known: dict[str, tuple[object, str]] = {"": (root, "")}

    def __call__(self, path: str) -> str:
        """The name for a path."""
        above, _, last = path.rpartition(".")
        module, prefix = self._above(above)
        return prefix[:-1] if _is_left_out(module, last) else prefix + last

    def _above(self, path: str) -> tuple[object, str]:
        """What lies at a path, and what the names of all below it begin with."""
        known = self._known.get(path)
        if known is None:
            above, _, last = path.rpartition(".")
            module, prefix = self._above(above)
            longer = prefix if _is_left_out(module, last) else f"{prefix}{last}."
            known = self._known[path] = getattr(module, last, None), longer
        return known


def _is_left_out(module: object, part: str) -> bool:
    if part == "module":
        return isinstance(module, (DataParallel, DistributedDataParallel))
    return part in _MARKS
