"""Runs of a root that was emptied since: nobody goes on from them; their memory is given back."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress

from shardwise.errors import StoreError
from shardwise.memory.home import ROOT, Home, Run, read_record, write_record
from shardwise.memory.node.retire import discard_newer
from shardwise.memory.ranks import has_trainers

log = logging.getLogger("shardwise")


def remove_predecessors(home: Home, run: Run, root: str) -> None:
    """Remove what this node keeps of other runs of the root of a run, which is written down.

    One stays that has a trainer here, or that the agent does not cease to work on.
    """
    write_record(run.path / ROOT, root)
    for name in home.runs():
        if name != run.name and _is_of(home, name, root):
            other = home.run(name)
            if has_trainers(other):
                continue
            try:
                discard_newer(other, None)
            except StoreError as error:
                log.warning("run %s, which went before, is not removed: %s", name, error)
                continue
            shutil.rmtree(other.path, ignore_errors=True)


def _is_of(home: Home, name: str, root: str) -> bool:
    with suppress(StoreError):  # it is no run, or its record is damaged
        return read_record(home.run(name).path / ROOT, str) == root
    return False
