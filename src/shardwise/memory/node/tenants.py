"""Whose memory a node keeps ready: that of ranks which have moved away is given back."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from shardwise.memory.home import Place, Run
from shardwise.memory.ranks import is_present

SLOT = ".slot"


def evict(run: Run, stays: Callable[[int], bool]) -> None:
    """Remove the free slots of ranks that do not stay on this node."""
    with suppress(FileNotFoundError):
        for name in os.listdir(run.free):
            if name.endswith(SLOT) and not stays(rank_of(name)):
                (run.free / name).unlink(missing_ok=True)


def rank_of(name: str) -> int:
    """The rank that a slot, or a record of a data file, is of."""
    return int(name[1:].split("-")[0])


def evict_movers(newest: Place) -> None:
    """Remove the free slots of ranks that live elsewhere by now: an agent's work, not a trainer's.

    Ranks whose part of the newest snapshot lies here are expected back, though none may live just
    now.

    Args:
        newest: the newest snapshot that is committed.
    """
    expected = {rank_of(name) for name in newest.named(".staged.json")}
    evict(newest.run, lambda rank: rank in expected or is_present(newest.run, rank))
