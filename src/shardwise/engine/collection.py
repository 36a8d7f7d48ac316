"""Python's cyclic garbage collector, kept out of the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
