"""`report`: what telemetry says about a checkpoint or a run. It writes the page and the trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.kernel.api import Place
from shardwise.kernel.api import open as open_checkpoint
from shardwise.kernel.errors import ShardwiseError, text_of
from shardwise.kernel.store import Store, open_store
from shardwise.parts.reporting.collect import Collected, Operation, choose_baseline, collect
from shardwise.parts.reporting.comparison import Slowdown, compare_operations
from shardwise.parts.reporting.groups import group_ranks
from shardwise.parts.reporting.page import Shown, make_page
from shardwise.parts.reporting.stragglers import Straggler, find_stragglers
from shardwise.parts.reporting.tensor_map import largest_tensors, tensor_map
from shardwise.parts.reporting.trace import encode_trace
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.words import format_seconds

MOST_SHOWN = 8
"""The most operations that a page shows in detail."""
MOST_CELLS = 1_200_000
"""The most numbers of ranks in a page, three for each stage of a rank. Each takes up to 3 bytes."""

MOST_BOXES = 300_000
"""The most boxes of tensors that are looked up; more take seconds."""
LEAST_CLOCK_ERROR = 1.0
"""Seconds."""
MOST_CLOCKS = 3

Read = Callable[[Operation], Telemetry | None]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Where the time of a save, a load or a whole run went.

    Example:

        report = sw.report("runs/a")
        for each in report.stragglers:
            print(each.stage, each.group.hosts, each.seconds)
        report.write_page("report.html")

    Attributes:
        path: the path or URL of the checkpoint or of the run.
        operation: the operation that the report is about: the save of the checkpoint, or the newest
            save of the run. None if there is no telemetry of it.
        operations: all operations of the run with telemetry, by the time of their start.
        stragglers: the ranks that made the operation slow, those that lost most time first.
        slowdown: how the operation differs from another save; None if there is none.
        problems: what is damaged or missing, one line each.
    """

    path: str
    operation: Operation | None
    operations: tuple[Operation, ...]
    stragglers: tuple[Straggler, ...]
    slowdown: Slowdown | None
    problems: tuple[str, ...]
    _collected: Collected = field(repr=False)
    _shown: tuple[Shown, ...] = field(repr=False)
    _tensors: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def headline(self) -> str:
        """What the report is about, as a sentence."""
        if self.operation is None:
            return "No telemetry can be read of this checkpoint"
        newer = self._collected.newer
        if newer is None:
            return self.operation.headline
        return f"{self.operation.headline}; step {newer:,} is newer, without readable telemetry"

    def write_page(self, path: str | os.PathLike[str]) -> int:
        """Write the report as one HTML file, which needs no network.

        Returns:
            The size of the file in bytes.

        Raises:
            OSError: the file cannot be written.
        """
        page = make_page(self.path, self._collected, self._shown, self._tensors, self.problems)
        return Path(path).write_bytes(page.encode("utf-8", "replace"))

    def write_trace(self, path: str | os.PathLike[str]) -> int:
        """Write the operations that the page shows as a trace for Perfetto or `chrome://tracing`.

        Returns:
            The size of the file in bytes.

        Raises:
            OSError: the file cannot be written.
        """
        return Path(path).write_bytes(encode_trace([each.telemetry for each in self._shown]))


def report(place: Place, *, baseline: Place | None = None, tensors: Sequence[str] = ()) -> Report:
    """Read the telemetry of a checkpoint or a run, and find out what was slow.

    Telemetry that is missing or damaged is listed in `Report.problems`, and the rest is used.

    Args:
        place: a checkpoint, or the root of a run.
        baseline: a checkpoint or a run to compare with. Default: the save of median duration among
            the earlier ones of this run with the same number of ranks.
        tensors: the names of tensors whose shards the page shows. Default: the largest tensors of
            different shapes.

    Raises:
        CheckpointNotFoundError: the place has neither checkpoints nor telemetry.
        StoreError, OSError: the place cannot be read.
    """
    store = open_store(place)
    problems: list[str] = []
    collected = collect(store)
    read = _reader(collected, problems)
    main = None if collected.main is None else collected.operations[collected.main]
    telemetry = None if main is None else read(main)
    shown, slowdown = [], None
    if main is not None and telemetry is not None:
        problems += _wrong_clocks(telemetry)
        if baseline is not None:
            other = _baseline(open_store(baseline), problems)
        else:
            chosen = choose_baseline(collected.operations, main)
            other = None if chosen is None else read(chosen)
        slowdown = None if other is None else compare_operations(telemetry, other)
        shown = [Shown(main, telemetry, slowdown), *_more_shown(collected, main, telemetry, read)]
    maps = _tensor_maps(store, tensors, problems)
    return Report(
        path=str(store),
        operation=None if telemetry is None else main,
        operations=collected.operations,
        stragglers=() if telemetry is None else tuple(find_stragglers(telemetry)),
        slowdown=slowdown,
        problems=(*collected.problems, *problems),
        _collected=collected,
        _shown=tuple(shown),
        _tensors=tuple(maps),
    )


def _reader(collected: Collected, problems: list[str]) -> Read:
    """Return a function that reads telemetry again. It notes a problem if the file is gone."""

    def read(operation: Operation) -> Telemetry | None:
        try:
            return collected.read(operation)
        except (ShardwiseError, OSError) as error:
            problems.append(text_of(error))
            return None

    return read


def _wrong_clocks(telemetry: Telemetry) -> list[str]:
    """Return which ranks had clocks that differed from that of the first rank by a second."""
    off = np.abs(telemetry.clock) / 1e6
    found = group_ranks(telemetry, off >= LEAST_CLOCK_ERROR, off)
    return [
        f"the clock of {group.label} was off by {format_seconds(float(off[rows].max()))} from that "
        f"of rank {telemetry.ranks[0]}: synchronize the clocks of the hosts, for example with NTP"
        for group, rows in found[:MOST_CLOCKS]
    ]


def _baseline(store: Store, problems: list[str]) -> Telemetry | None:
    """Return the telemetry to compare with; None, and a problem, if there is none."""
    collected = collect(store)
    problems += [f"to compare with: {problem}" for problem in collected.problems]
    if collected.main is None:
        return None
    return _reader(collected, problems)(collected.operations[collected.main])


def _more_shown(
    collected: Collected, main: Operation, telemetry: Telemetry, read: Read
) -> list[Shown]:
    """Return the further operations that fit into the page.

    The save that the main one is compared with, the slowest save and the newest recovery come
    first.
    """
    others = [each for each in collected.operations if each is not main]
    saves = [each for each in others if each.is_save]
    recoveries = [each for each in others if not each.is_save]
    wanted = [
        choose_baseline(collected.operations, main),
        max(saves, key=lambda each: each.seconds, default=None),
        *recoveries[-1:],
        *reversed(others),
    ]
    left = MOST_CELLS - 3 * main.ranks * len(telemetry.stages)
    shown: dict[str, Shown] = {}
    for each in wanted:
        if each is None or each.file in shown or len(shown) + 1 >= MOST_SHOWN:
            continue
        cells = 3 * each.ranks * len(each.medians)
        found = read(each) if cells <= left else None
        if found is not None:
            shown[each.file] = Shown(each, found, None)
            left -= cells
    return list(shown.values())


def _tensor_maps(store: Store, chosen: Sequence[str], problems: list[str]) -> list[dict[str, Any]]:
    """Return the maps of tensors of the checkpoint, or of the newest one of the run."""
    maps: list[dict[str, Any]] = []
    with _noted(problems):
        checkpoint = open_checkpoint(store, skip_unknown=True)
        known = checkpoint.tensors()
        problems += [f"there is no tensor {name!r}" for name in chosen if name not in known]
        names = [name for name in chosen if name in known] or largest_tensors(checkpoint)
        for name in names:
            if sum(each["boxes"] for each in maps) < MOST_BOXES:
                maps.append(tensor_map(checkpoint, name))
    return maps


@contextmanager
def _noted(problems: list[str]) -> Iterator[None]:
    """Note a failure to read the shards of tensors as a problem."""
    try:
        yield
    except (ShardwiseError, OSError) as error:
        problems.append(f"the shards of tensors cannot be shown: {text_of(error)}")
