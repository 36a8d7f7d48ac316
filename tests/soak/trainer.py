"""A rank between two failures: restore, check every byte, then a snapshot of each step."""

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
"""That a rank's file takes many reads, slots of the ranks that read it together, and blocks."""
EVERY = 20
SLOTS = 2
FAILED = 1
TIMEOUT = timedelta(seconds=20)
LONGEST_SAVE = 0.015
"""Seconds: meeting, copy and notes; who is to die while saving dies at some moment of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the ranks of one cycle are to do.

    Attributes:
        cycle: its number, which all that it saves bears.
        nodes: the directory of each rank's node.
        axis: by which the first tensor is divided; the next one is by the other, and so on.
        staging_bytes: the memory that ranks read into.
        steps: how many to train, unless something ends it before.
        overlap: copy while the training goes on.
        dies_saving: the rank that is killed while it saves, and at which of its steps.
        ends_well: close properly at the end, as a run does that is complete.
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
    """A line of the journal: what a rank (-1: who lets it fail) has seen, of which step, when."""

    rank: int
    what: str
    at: float
    step: int = -1
    text: str = ""


class Journal:
    """Lines that outlive whoever wrote them."""

    def __init__(self, path: str, rank: int) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._rank = rank

    def write(self, what: str, step: int = -1, text: str = "") -> None:
        """Add a line."""
        os.write(
            self._fd, msgspec.json.encode(Line(self._rank, what, time.time(), step, text)) + b"\n"
        )


def lines_of(journal: Path) -> list[Line]:
    """All lines that are whole."""
    with suppress(FileNotFoundError):
        lines = journal.read_bytes().split(b"\n")[:-1]
        return [msgspec.json.decode(line, type=Line) for line in lines]
    return []


def index_of(box: sw.Box) -> torch.Tensor:
    """Values that tell where they belong in a tensor."""
    at = [torch.arange(low, low + size) for low, size in zip(box.offset, box.shape, strict=True)]
    return (at[0][:, None] * SHAPE[1] + at[1][None, :]).to(torch.float32)


def shift_of(step: int, cycle: int, tensor: int) -> int:
    """What is added to them: tells when, in which cycle, and in which tensor they were saved."""
    return (step * 7919 + cycle * 104729 + tensor * 1299709) % 8_000_000


def box_of(axis: int) -> sw.Box:
    """This rank's part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = list(SHAPE)
    shape[axis] //= world
    offset = [0, 0]
    offset[axis] = shape[axis] * rank
    return sw.Box(tuple(offset), tuple(shape))


class State:
    """Tensors that are divided, one that all have, and numbers: all functions of step and cycle."""

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
        """In place, as an optimizer would."""
        for i, (index, tensor) in enumerate(zip(self._index, self._tensors, strict=True)):
            torch.add(index, shift_of(step, cycle, i), out=tensor)
        self.values |= {"step": step, "cycle": cycle}

    def wrong(self, step: int) -> str:
        """What is not as it was saved at this step; empty if all is."""
        said, cycle = self.values["step"], self.values["cycle"]
        if said != step:
            return f"restored step {step}, and it says it is {said}"
        for i, (index, tensor) in enumerate(zip(self._index, self._tensors, strict=True)):
            differ = int((tensor != index + shift_of(step, cycle, i)).sum())
            if differ:
                return f"step {step} of cycle {cycle}: {differ} wrong values in tensor {i}"
        return ""


def train(orders: Orders) -> None:
    """One cycle, as a rank; a process that fails ends, as one of torchrun does."""
    journal = Journal(orders.journal, dist.get_rank())
    journal.write("here", text=str(os.getpid()))
    try:
        attempt(orders, journal)
    except BaseException as error:
        journal.write("raised", text="".join(traceback.format_exception(error)))
        os._exit(FAILED)
    journal.write("ended")


def attempt(orders: Orders, journal: Journal) -> None:
    """Restore, and go on."""
    rank = dist.get_rank()
    memory = sw.Memory(
        dir=orders.nodes[rank],
        snapshot_every=1,
        slots=SLOTS,
        parity=1,
        overlap=orders.overlap,
        when_full="wait",
        wait=10.0,
    )
    keep = sw.Keep(last=2)
    with sw.Checkpointer(
        orders.root,
        keep=keep,
        save_every=EVERY,
        at_end=False,
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
    """The step to go on from; 0 if there is nothing."""
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
    """Train from a step on."""
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
            raise RuntimeError(f"step {step} was left out, though it was to wait for a slot")
        begun.append((step, handle))
        time.sleep(chance.random() * 0.02)
        handle.staged(30.0)
        begun = [each for each in begun if not all(tell(*each, journal))]


def tell(step: int, handle: sw.SaveHandle, journal: Journal) -> Iterator[bool]:
    """Write how far a save has come; gives whether each stage has ended."""
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
    """Have this process killed after so many seconds, whatever it is at then."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
