"""How soon all ranks have their state back when one of four hosts is gone.

Each rank has a node, which is a directory with an agent of its own; they protect each other by
parity. The last node is lost as a host is that loses its power: its memory is empty, and whoever
calls its old address hears nothing. All four ranks restore, the last one on an empty node.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import torch
import torch.distributed as dist
from harness import ROWS, Bench, Size, arguments
from limits import copier
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.memory.records import AgentInfo

STATE = Size(tensors=16)
MEMORY = Path("/dev/shm/shardwise-recover")
NEVER = 1 << 30
COPY = "copy of each rank's share"
WHOLE = "sw: restore, nothing lost"
LOST = "sw: restore, one of four hosts gone"
PENDING = "sw: restore, one gone that alone could complete a newer step"
PHASES = ("asking", "choosing", "reading", "decoding", "rebuilding")
FIXED = 1.5


def main() -> None:
    bench = Bench("recover", STATE, arguments())
    mine = bench.model(ROWS)
    wanted = {name: torch.zeros_like(each) for name, each in mine.items()}
    copy = copier([each.to_local() for each in mine.values()], 1)
    phases: dict[str, list[dict[str, float]]] = {}
    for step in bench.rounds:
        for name in (WHOLE, LOST, PENDING):
            with ExitStack() as cleanup:
                cleanup.callback(clean, bench)
                save(bench, mine, step)
                if name is WHOLE:
                    bench.measure(COPY, copy)
                else:
                    lose(bench, cleanup, name)
                phases.setdefault(name, []).append(restore(bench, name, mine, wanted))
    bench.compare(COPY, WHOLE, LOST, PENDING)
    for name in (LOST, PENDING):
        taken = zip(bench.seconds[name], bench.seconds[COPY], strict=True)
        beyond = statistics.median(seconds - 2 * copied for seconds, copied in taken)
        bench.goal(f"{name.removeprefix('sw: ')}, s beyond half of copy", beyond, most=FIXED)
    rows: list[dict[str, object]] = [
        {"": name.removeprefix("sw: ")}
        | {each: round(statistics.median(one[each] for one in taken), 3) for each in PHASES}
        for name, taken in phases.items()
    ]
    bench.table("seconds by phase, of the slowest rank", rows)
    bench.finish()


def save(bench: Bench, mine: dict[str, DTensor], step: int) -> None:
    """Save a step, and leave once it is protected."""
    with checkpointer_of(bench) as checkpointer:
        handle = checkpointer.save(step, {"model": mine})
        if handle is None:
            raise RuntimeError("a save that waits for a slot was left out")
        handle.protected()
        dist.barrier()


def lose(bench: Bench, cleanup: ExitStack, name: str) -> None:
    """Take the last rank's host away."""
    if bench.rank == bench.world - 1:
        (path,) = node(bench.rank).glob("*/agent.json")
        info = msgspec.json.decode(path.read_bytes(), type=AgentInfo)
        os.kill(info.process, signal.SIGKILL)
        shutil.rmtree(node(bench.rank))
        cleanup.enter_context(off(urlsplit(info.url).port or 0))
    elif name is PENDING:
        (run,) = node(bench.rank).glob("*/runs/*")
        (run / "step-99999999").mkdir()  # what is left of a step that was being saved
    dist.barrier()


@contextmanager
def off(port: int) -> Iterator[None]:
    """A port that takes no connection and refuses none, as that of a host without power."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(500):  # until the agent, which was killed, is gone
            with suppress(OSError):
                listener.bind(("127.0.0.1", port))
                break
            time.sleep(0.01)
        listener.listen(0)
        for _ in range(4):
            line = sockets.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(("127.0.0.1", port))
        yield


def restore(
    bench: Bench, name: str, mine: dict[str, DTensor], wanted: dict[str, DTensor]
) -> dict[str, float]:
    """Restore on all ranks, and compare each byte; each phase's seconds, of the slowest rank."""
    for tensor in wanted.values():
        tensor.to_local().zero_()
    with checkpointer_of(bench) as checkpointer:
        bench.measure(name, lambda: checkpointer.restore({"model": wanted}))
        report = checkpointer.last_restore
    if report is None or report.source != "memory":
        raise RuntimeError(f"it came from elsewhere: {report}")
    if not all(torch.equal(mine[key].to_local(), wanted[key].to_local()) for key in mine):
        raise RuntimeError("what was restored is not what was saved")
    everyone = bench.gathered(report.seconds)
    return {phase: max(each[phase] for each in everyone) for phase in PHASES}


@contextmanager
def checkpointer_of(bench: Bench) -> Iterator[sw.Checkpointer]:
    """This rank's, on a node of its own."""
    directory = node(bench.rank)
    directory.mkdir(parents=True, exist_ok=True)
    memory = sw.Memory(
        dir=str(directory), parity=1, group=4, slots=1, when_full="wait", rescue=False
    )
    checkpointer = sw.Checkpointer(bench.dir / "root", save_every=NEVER, memory=memory)
    try:
        yield checkpointer
    finally:
        checkpointer.close(wait=False)


def node(rank: int) -> Path:
    """The memory of a rank's node."""
    return MEMORY / f"node{rank}"


def clean(bench: Bench) -> None:
    """End the agents, and leave nothing in memory or in the root."""
    dist.barrier()
    if bench.rank == 0:
        for path in MEMORY.glob("node*/*/agent.json"):
            os.kill(msgspec.json.decode(path.read_bytes(), type=AgentInfo).process, signal.SIGKILL)
        shutil.rmtree(MEMORY, ignore_errors=True)
        shutil.rmtree(bench.dir / "root", ignore_errors=True)
    dist.barrier()


if __name__ == "__main__":
    main()
