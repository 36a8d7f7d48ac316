"""Context of public calls: without torch.compile, and without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause cyclic collection while the block runs.

    Describing ten thousand tensors makes objects fast enough to set off full collections, each of
    which walks all objects of the process, torch's included. None of ours are in cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


P = ParamSpec("P")
R = TypeVar("R")


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, which `torch.compile` leaves alone, with all that it calls.

    That is what `torch.compiler.disable` is for. But it imports the compiler, which takes longer
    than most saves, so it is only used where that is there already.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
