"""Processor seconds of processes, their threads and their descendants."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PARENT, USER, SYSTEM, WAITED_USER, WAITED_SYSTEM = 1, 11, 12, 13, 14
"""Positions of fields in /proc/<process>/stat, counted after the name."""


def family(roots: Iterable[int]) -> set[int]:
    """Return these processes and all their descendants."""
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (fields := _stat(int(path.name))):
            parents[int(path.name)] = int(fields[PARENT])
    found = set(roots)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def processor_seconds(processes: Iterable[int]) -> float:
    """Return the seconds used so far by processes and by their exited children."""
    fields = [found for each in processes if (found := _stat(each))]
    wanted = (USER, SYSTEM, WAITED_USER, WAITED_SYSTEM)
    return sum(int(each[field]) for each in fields for field in wanted) / TICK


def _stat(process: int) -> list[str]:
    """Return the fields after the name; an empty list if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return []
