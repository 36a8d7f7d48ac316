"""What each rank of a node does now: its stage, and whether it waits for other ranks.

A rank writes this into the file of its lock, behind the owner: one system call, and nothing that
survives the rank. So a reader also sees whether the rank is alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shardwise.kernel.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.kernel.events import Watcher
from shardwise.kernel.manifest.manifest import Count
from shardwise.parts.memory.home import Run
from shardwise.parts.memory.rank_liveness import RankLock, ranks_here

RECORD_SIZE = 256
MOST_RANKS_OF_NODE = 4096
Word = Annotated[str, msgspec.Meta(max_length=32)]


@prepare_decoding
class PresentStage(msgspec.Struct, frozen=True, array_like=True):
    """What a rank does now.

    Attributes:
        operation: for example `save`; "" if the rank trains.
        step: the step; None if there is none.
        stage: the name of the stage; "" between stages.
        waits: whether the rank waits for other ranks.
        since: when this began, in seconds since 1970.
    """

    operation: Word = ""
    step: Count | None = None
    stage: Word = ""
    waits: bool = False
    since: float = 0.0


@prepare_decoding
class RankProgress(msgspec.Struct, frozen=True):
    """What a rank does now, as its node reports it.

    Attributes:
        rank: the rank.
        alive: whether the rank is alive.
        operation, step, stage, waits: as in `PresentStage`.
        seconds: for how long.
    """

    rank: Count
    alive: bool
    operation: Word = ""
    step: Count | None = None
    stage: Word = ""
    waits: bool = False
    seconds: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


NodeProgress = Annotated[list[RankProgress], msgspec.Meta(max_length=MOST_RANKS_OF_NODE)]


def make_watcher(
    lock: RankLock, operation: str, step: int | None, clock: Callable[[], float] = time.time
) -> Watcher:
    """Return a function that writes each change of the stage of an operation.

    Args:
        lock: the lock of this rank.
        operation, step: as in `PresentStage`.
        clock: seconds since 1970.
    """

    def write(stage: str, waits: bool) -> None:
        present = PresentStage(operation, step, stage[:32], waits, clock())
        if not stage and not waits:
            present = PresentStage(since=clock())
        data = msgspec.json.encode(present).ljust(RECORD_SIZE)
        with suppress(OSError):  # nobody may see it, but the operation goes on
            lock.write_note(data[:RECORD_SIZE])

    return write


def read_progress(run: Run, clock: Callable[[], float] = time.time) -> list[RankProgress]:
    """Return what the ranks of a run on this node do now.

    Args:
        run: the run.
        clock: seconds since 1970.
    """
    found = []
    for rank, alive, note in ranks_here(run, RECORD_SIZE)[:MOST_RANKS_OF_NODE]:
        present = PresentStage()
        with suppress(*DECODE_ERRORS, msgspec.ValidationError):  # it is just being written
            present = msgspec.json.decode(note, type=PresentStage) if note.strip() else present
        seconds = max(0.0, clock() - present.since) if present.since else 0.0
        found.append(
            RankProgress(
                rank,
                alive,
                present.operation,
                present.step,
                present.stage,
                present.waits,
                seconds,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """What the ranks of a run do now.

    Attributes:
        run: the id of the run.
        ranks: how many ranks were seen.
        lost: the ranks that died.
        counts: operation, step, stage, whether the ranks wait, and how many ranks do this.
        slowest: the ranks for which the others wait, each with its node: those that have worked in
            a stage for the longest time. If a rank has not begun, its `seconds` say how long others
            have waited.
        nodes: how many nodes the run has.
        unanswered: how many of them have not answered.
    """

    run: str
    ranks: int
    lost: list[int]
    counts: list[tuple[str, int | None, str, bool, int]]
    slowest: list[tuple[str, RankProgress]]
    nodes: int
    unanswered: int


def summarize(
    run: str, nodes: Sequence[tuple[str, list[RankProgress]]], *, unanswered: int, most: int = 10
) -> RunProgress:
    """Return what the ranks of several nodes do, in a size that does not grow with the ranks.

    Args:
        run: the id of the run.
        nodes: the name of each node that answered, and its ranks.
        unanswered: how many nodes have not answered.
        most: how many ranks to list.
    """
    ranks = [(node, each) for node, found in nodes for each in found]
    counts: dict[tuple[str, int | None, str, bool], int] = {}
    for _, each in ranks:
        if each.alive:
            key = each.operation, each.step, each.stage, each.waits
            counts[key] = counts.get(key, 0) + 1
    waited = [each.seconds for _, each in ranks if each.alive and each.waits]
    busy = [pair for pair in ranks if pair[1].alive and pair[1].stage and not pair[1].waits]
    if waited:  # ranks that have not even begun are waited for, too
        busy += [
            (node, msgspec.structs.replace(each, seconds=max(waited)))
            for node, each in ranks
            if each.alive and not each.operation
        ]
    busy.sort(key=lambda pair: (bool(pair[1].operation), -pair[1].seconds))
    return RunProgress(
        run=run,
        ranks=len(ranks),
        lost=sorted(each.rank for _, each in ranks if not each.alive)[:most],
        counts=sorted(((*key, count) for key, count in counts.items()), key=lambda row: -row[4]),
        slowest=busy[:most],
        nodes=len(nodes) + unanswered,
        unanswered=unanswered,
    )
