"""Runs whose trainers ended before their first snapshot: their memory is given back."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress

from shardwise.errors import StoreError
from shardwise.memory.home import Home, Run, hold
from shardwise.memory.identity import node_name
from shardwise.memory.ranks import has_trainers
from shardwise.memory.registry import forget

ASIDE = "vacant-"


class Vacancies:
    """The runs of a node that have neither trainers nor snapshots, and since when.

    Args:
        home: of the node.
        pause: seconds until one is removed; trainers that start again find its memory until then.
    """

    def __init__(self, home: Home, pause: float) -> None:
        self._home = home
        self._pause = pause
        self._since: dict[str, float] = {}
        for left in home.path.glob(f"{ASIDE}*"):  # an agent was killed as it removed them
            shutil.rmtree(left, ignore_errors=True)

    def sweep(self) -> None:
        """Remove those that have been vacant for long enough."""
        now = time.monotonic()
        vacant = [run for run in self._runs() if _is_vacant(run)]
        self._since = {run.name: self._since.get(run.name, now) for run in vacant}
        for run in vacant:
            if now - self._since[run.name] >= self._pause:
                del self._since[run.name]
                _remove(self._home, run)

    def _runs(self) -> Iterator[Run]:
        for name in self._home.runs():
            with suppress(StoreError):  # it is none of ours
                yield self._home.run(name)


def _is_vacant(run: Run) -> bool:
    return not run.steps() and not has_trainers(run)


def _remove(home: Home, run: Run) -> None:
    """A trainer that comes just now takes its place before, or in a run of this name that is made
    anew."""
    aside = home.path / f"{ASIDE}{secrets.token_hex(4)}"
    with hold(run.path, shared=False) as alone:
        if alone and _is_vacant(run):
            forget(run, node_name(home))
            run.path.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
