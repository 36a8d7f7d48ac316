"""Guards around public calls: torch.compile skips them, and garbage collection is paused."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause Python's cyclic garbage collection while the block runs.

    Describing ten thousand tensors allocates objects fast enough to start full collections. Each
    of them walks all objects of the process, including torch's. This library makes no cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that `torch.compile` skips it and everything that it calls.

    `torch.compiler.disable` does this, but imports the compiler, which takes longer than most
    saves. It is therefore used only if the compiler is imported already.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" in sys.modules:
            disabled: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
