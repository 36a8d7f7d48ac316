"""The time to restore on all ranks after the loss of one of four hosts.

Limit: a copy of each rank's share at half of the memory's bandwidth, plus 1.5 s. The nodes protect
each other by parity. The last host fails like one that loses power: its memory is lost, and its old
address does not respond. All four ranks restore, the last one on an empty node.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.harness import ROWS, Bench, Size, parse_arguments
from benchmarks.limits import make_copier
from benchmarks.nodes import Nodes, save_protected

STATE = Size(tensors=16)
COPY = "copy of each rank's share"
WHOLE = "sw: restore, nothing lost"
LOST = "sw: restore, one of four hosts gone"
PENDING = "sw: restore, one gone that alone could complete a newer step"
PHASES = ("asking", "choosing", "reading", "rebuilding")
FIXED = 1.5


def main() -> None:
    bench = Bench("recover", STATE, parse_arguments())
    nodes, mine = Nodes(bench), bench.model(ROWS)
    wanted = bench.model(ROWS)
    copy = make_copier([each.to_local() for each in mine.values()], 1)
    phases: dict[str, list[dict[str, float]]] = {}
    for step in bench.rounds:
        for name in (WHOLE, LOST, PENDING):
            with ExitStack() as cleanup:
                cleanup.callback(nodes.clean)
                with nodes.checkpointer(group=4) as checkpointer:
                    save_protected(checkpointer, step, {**mine})
                if name is WHOLE:
                    bench.measure(COPY, copy)
                else:
                    lose(bench, nodes, cleanup, name)
                phases.setdefault(name, []).append(restore(bench, nodes, name, mine, wanted))
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


def lose(bench: Bench, nodes: Nodes, cleanup: ExitStack, name: str) -> None:
    """Lose the host of the last rank."""
    if bench.rank == bench.world - 1:
        info = nodes.lose(bench.rank)
        cleanup.enter_context(off(urlsplit(info.url).port or 0))
    elif name is PENDING:
        (run,) = nodes[bench.rank].glob("*/runs/*")
        (run / f"step-99999999-{9:016x}").mkdir()  # as left by an interrupted save
    dist.barrier()


@contextmanager
def off(port: int) -> Iterator[None]:
    """Make a port that neither accepts nor refuses connections, like a host without power."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(500):  # until the killed agent is gone
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
    bench: Bench, nodes: Nodes, name: str, mine: dict[str, DTensor], wanted: dict[str, DTensor]
) -> dict[str, float]:
    """Restore and compare all bytes; return the seconds of each phase on the slowest rank."""
    for tensor in wanted.values():
        tensor.to_local().zero_()
    with nodes.checkpointer(group=4) as checkpointer:
        bench.measure(name, lambda: checkpointer.restore({"model": wanted}))
        report = checkpointer.last_restore
    if report is None or report.source != "memory":
        raise RuntimeError(f"the step was not restored from memory: {report}")
    if not all(torch.equal(mine[key].to_local(), wanted[key].to_local()) for key in mine):
        raise RuntimeError("the restored values differ from the saved ones")
    everyone = bench.gather_values(report.seconds)
    return {phase: max(each[phase] for each in everyone) for phase in PHASES}


if __name__ == "__main__":
    main()
