"""A rank in one cycle: restore, check every byte, then take a snapshot of each step."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import shardwise as sw

SHAPE = (768, 1152)
TENSORS = 6
"""Large enough that a rank's file needs many reads, shared buffers and blocks."""
EVERY = 20
SLOTS = 2
FAILED = 1
TIMEOUT = timedelta(seconds=20)
LONGEST_SAVE = 0.015
"""Seconds that a save may take; a rank that dies while saving does so within them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """The orders for the ranks of one cycle.

    Attributes:
        cycle: number of the cycle; part of all values that the cycle saves.
        nodes: directory of each rank's node.
        root: root of the run.
        journal: path of the journal.
        seed: seed of random choices.
        axis: axis by which the first tensor is sharded; the other tensors alternate.
        staging_bytes: size of the buffers for reading.
        steps: number of steps to train, unless a fault ends the cycle first.
        overlap: whether to copy snapshots during the next step.
        dies_saving: rank that is killed during a save, and which of its saves.
        ends_well: whether to close properly at the end, like a complete run.
    """

    cycle: int
    nodes: tuple[str, ...]
    root: str
    journal: str
    seed: int
    axis: int
    staging_bytes: int
    steps: int
    overlap: bool
    dies_saving: tuple[int, int] | None = None
    ends_well: bool = False


class Line(msgspec.Struct, frozen=True):
    """A line of the journal: an event of a rank (-1 for the fault), its time and step."""

    rank: int
    what: str
    at: float
    step: int = -1
    text: str = ""


class Journal:
    """A file of lines. Each line is written at once, so that it survives the process."""

    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rank = rank

    def write(self, what: str, step: int = -1, text: str = "") -> None:
        """Add a line."""
        os.write(
            self._fd, msgspec.json.encode(Line(self._rank, what, time.time(), step, text)) + b"\n"
        )


def lines_of(journal: Path) -> list[Line]:
    """Return all complete lines of a journal."""
    with suppress(FileNotFoundError):
        lines = journal.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Line) for line in lines]
    return []


def size_of(journal: Path) -> int:
    """Return the size of a journal in bytes: it grows whenever a rank goes on."""
    return journal.stat().st_size if journal.exists() else 0


def index_of(box: sw.Box) -> torch.Tensor:
    """Return the index of each element of a box in its tensor."""
    at = [torch.arange(low, low + size) for low, size in zip(box.offset, box.shape, strict=True)]
    return (at[0][:, None] * SHAPE[1] + at[1][None, :]).to(torch.float32)


def shift_of(step: int, cycle: int, tensor: int) -> int:
    """Return a number that identifies step, cycle and tensor, to add to the indices."""
    return (step * 7919 + cycle * 104729 + tensor * 1299709) % 8_000_000


def box_of(axis: int) -> sw.Box:
    """Return this rank's box."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = list(SHAPE)
    shape[axis] //= world
    offset = [0, 0]
    offset[axis] = shape[axis] * rank
    return sw.Box(tuple(offset), tuple(shape))


class State:
    """Sharded tensors, a replicated tensor, and numbers. All are functions of step and cycle."""

    def __init__(self, axis: int) -> None:
        boxes = [box_of((axis + i) % 2) for i in range(TENSORS)]
        boxes.append(sw.Box((0, 0), (64, SHAPE[1])))
        self._index = [index_of(box) for box in boxes]
        self._tensors = [torch.zeros(box.shape) for box in boxes]
        self.values: dict[str, Any] = {
            f"t{i}": sw.Shards(SHAPE, torch.float32, [(box, tensor)])
            for i, (box, tensor) in enumerate(zip(boxes, self._tensors, strict=True))
            if i < TENSORS
        }
        self.values |= {"common": self._tensors[-1], "step": -1, "cycle": -1}

    def become(self, step: int, cycle: int) -> None:
        """Set all values to those of a step, in place, like an optimizer."""
        for i, (index, tensor) in enumerate(zip(self._index, self._tensors, strict=True)):
            torch.add(index, shift_of(step, cycle, i), out=tensor)
        self.values |= {"step": step, "cycle": cycle}

    def wrong(self, step: int) -> str:
        """Return how the values differ from those saved at a step, or "" if they do not."""
        said, cycle = self.values["step"], self.values["cycle"]
        if said != step:
            return f"restored step {step}, but its saved step is {said}"
        for i, (index, tensor) in enumerate(zip(self._index, self._tensors, strict=True)):
            differ = int((tensor != index + shift_of(step, cycle, i)).sum())
            if differ:
                return f"step {step} of cycle {cycle}: {differ} wrong values in tensor {i}"
        return ""


def train(orders: Orders) -> None:
    """Run one cycle as a rank; exit the process on failure, as under torchrun."""
    journal = Journal(orders.journal, dist.get_rank())
    journal.write("here", text=str(os.getpid()))
    try:
        attempt(orders, journal)
    except BaseException as error:
        journal.write("raised", text="".join(traceback.format_exception(error)))
        os._exit(FAILED)
    journal.write("ended")


def attempt(orders: Orders, journal: Journal) -> None:
    """Restore, then train."""
    rank = dist.get_rank()
    memory = sw.Memory(
        dir=orders.nodes[rank],
        snapshot_every=1,
        slots=SLOTS,
        parity=1,
        overlap=orders.overlap,
        when_full="wait",
        wait=30.0,  # agents that were killed take long to start on a loaded machine
    )
    keep = sw.Keep(last=2)
    with sw.Checkpointer(
        orders.root,
        keep=keep,
        save_every=EVERY,
        save_at_end=False,
        memory=memory,
        staging_bytes=orders.staging_bytes,
        timeout=TIMEOUT,
    ) as checkpointer:
        journal.write("open")
        state = State(orders.axis)
        step = restore(checkpointer, state, journal)
        go_on(orders, checkpointer, state, step, journal)
        checkpointer.close(wait=orders.ends_well)


def restore(checkpointer: sw.Checkpointer, state: State, journal: Journal) -> int:
    """Restore and check the state; return its step, or 0 if there was nothing to restore."""
    step = checkpointer.restore(state.values)
    if step is not None and (wrong := state.wrong(step)):
        journal.write("wrong", step, wrong)
        raise RuntimeError(wrong)
    report = checkpointer.last_restore
    source = "" if report is None else f"{report.source}; {report.skipped}"
    journal.write("restored", -1 if step is None else step, f"{state.values['cycle']}; {source}")
    return step or 0


def go_on(
    orders: Orders, checkpointer: sw.Checkpointer, state: State, done: int, journal: Journal
) -> None:
    """Train from a step, and save after each one."""
    rank = dist.get_rank()
    chance = random.Random(orders.seed)  # the same on all ranks
    begun: list[tuple[int, sw.SaveHandle]] = []
    for step in range(done + 1, done + 1 + orders.steps):
        state.become(step, orders.cycle)
        journal.write("saving", step)
        if orders.dies_saving == (rank, step - done):
            die_soon(chance.random() * LONGEST_SAVE)
        handle = checkpointer.save(step, state.values)
        if handle is None:
            raise RuntimeError(f"step {step} was skipped instead of waiting for a slot")
        begun.append((step, handle))
        time.sleep(chance.random() * 0.02)
        handle.staged(45.0)  # longer than `Memory(wait=…)`
        begun = [each for each in begun if not all(tell(*each, journal))]


def tell(step: int, handle: sw.SaveHandle, journal: Journal) -> Iterator[bool]:
    """Write the stages that a save has reached; yield for each stage whether it has ended."""
    stages = {"committed": handle.committed, "protected": handle.protected, "over": handle.result}
    for what, wait in stages.items():
        try:
            wait(0.0)
        except TimeoutError:
            yield False
            return
        stored = what == "over" and step % EVERY == 0
        journal.write("stored" if stored else what, step)
        yield True


def die_soon(after: float) -> None:
    """Kill this process after a number of seconds."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
