"""A decorator that hides calls from `torch.compile`, and a block without garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


@contextmanager
def pause_gc() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while the block runs.

    A save of ten thousand tensors allocates so many objects that the collector would run several
    times, and so do the imports before the first save. Each run walks all objects of the process,
    including torch's. The library itself makes no reference cycles.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def skip_compile(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Decorate a function so that `torch.compile` skips the function and everything it calls.

    `torch.compiler.disable` does the same, but imports the compiler, which takes longer than most
    saves. So the decorator uses it only if the compiler is imported already.
    """

    @cache
    def disabled() -> Callable[Params, Result]:
        from torch.compiler import disable

        skipped: Callable[Params, Result] = disable(function)  # type: ignore[no-untyped-call]
        return skipped

    @wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        if "torch._dynamo" in sys.modules:
            return disabled()(*args, **kwargs)
        return function(*args, **kwargs)

    return call
