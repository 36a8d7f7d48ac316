"""The time to restore another rank's share from its agent, and by XOR from two other nodes.

Limits: a plain HTTP range download, and a copy in memory. Rank 0 restores what another rank saved,
first from the node of that rank, then after that node is lost with its memory.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import Bench, Size, parse_arguments
from benchmarks.limits import make_copier
from benchmarks.nodes import Nodes, save_protected
from benchmarks.peers import nothing
from shardwise.kernel.manifest.manifest import MANIFEST, decode_manifest
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.redundancy.placement import plan_protection
from shardwise.parts.memory.redundancy.rebuild import Rebuilder
from shardwise.parts.memory.seal import map_file

SHARES = Size(tensors=48)  # memory holds several copies: three slots for each rank, and parity
OWNER = 1
"""Rank whose share rank 0 restores."""
THREADS = 2
CHECK = "check"
DOWNLOAD, FROM_PEER = "plain HTTP range download", "sw: restore from a peer"
BY_XOR = "sw: restore by XOR of what two peers have"
COPY, XOR = "copy", "sw: XOR of what two peers have, all of it in memory"
SERVER = """
import sys
from aiohttp import web
app = web.Application()
app.router.add_static("/", sys.argv[1])
web.run_app(app, host="127.0.0.1", port=0, print=lambda said: print(said, flush=True))
"""
Tensors = dict[str, torch.Tensor]


def main() -> None:
    bench = Bench("rebuild", SHARES, parse_arguments())
    mine = share_of(bench, bench.rank, torch.randn)
    wanted = share_of(bench, OWNER, torch.zeros) if bench.rank == 0 else {}
    nodes = Nodes(bench)
    with ExitStack() as cleanup:
        cleanup.callback(nodes.clean)
        for step in bench.rounds:
            ask(bench, nodes, mine, wanted, step + 1)  # step 0 would also be saved to storage
    bench.compare(DOWNLOAD, FROM_PEER, BY_XOR)
    bench.compare(COPY, XOR)
    peer, xor = bench.ratio(DOWNLOAD, FROM_PEER), bench.ratio(COPY, XOR)
    bench.goal("restore from a peer, of a plain HTTP range download", peer, least=0.7)
    bench.goal("rebuild by XOR, the part in memory, of copy bandwidth", xor, least=0.5)
    bench.finish()


def ask(bench: Bench, nodes: Nodes, mine: Tensors, wanted: Tensors, step: int) -> None:
    """Save a step, and restore the share in all ways."""
    with nodes.checkpointer() as checkpointer:
        save_protected(checkpointer, step, {**mine})
        with ExitStack() as cleanup:
            ways = ways_of(nodes, step, bench.world, cleanup) if bench.rank == 0 else {}
            for name in (COPY, XOR, DOWNLOAD):
                bench.measure(name, ways.get(name, nothing))
                ways.get(CHECK, nothing)()
        restore(bench, FROM_PEER, checkpointer, wanted, "other nodes")
        compare(bench, mine, wanted)
    dist.barrier()
    if bench.rank == OWNER:
        nodes.lose(OWNER)
    with nodes.checkpointer() as checkpointer:
        restore(bench, BY_XOR, checkpointer, wanted, "decoded")
        compare(bench, mine, wanted)


def ways_of(
    nodes: Nodes, step: int, world: int, cleanup: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return the jobs of rank 0 on the owner's file: copy, rebuild, download, check."""
    held: dict[tuple[str, str], Buffer] = {}
    for rank in range(world):
        (home,) = nodes[rank].iterdir()
        name = (home / "node").read_text(encoding="utf-8")
        (snapshot,) = home.glob(f"runs/*/step-{step:08d}-*")
        held |= {(name, path.name): touched(path) for path in snapshot.iterdir()}
        if rank == OWNER:
            owner, directory = name, snapshot
    (file,) = (name for of, name in held if of == owner and name.endswith(".safetensors"))
    (run,) = Home(nodes[OWNER]).runs()
    (place,) = (each for each in run.snapshots() if each.step == step)
    pending = place.read_pending()
    if pending is None:
        raise RuntimeError(f"{place.path} has no pending manifest")
    manifest = decode_manifest(place.read_file(MANIFEST))
    protection = plan_protection(pending, manifest.files)
    lost = held[owner, file]
    copy = make_copier([torch.from_numpy(lost)], THREADS)
    out = copy()

    def read(of: str, name: str, offset: int, out: Buffer) -> Buffer:
        return held[of, name][offset : offset + len(out)]

    def check() -> None:
        if not np.array_equal(out, lost):
            raise RuntimeError("the rebuilt bytes differ from the lost ones")
        out[:] = 0

    rebuilder = Rebuilder(protection, read, lost=[owner], threads=THREADS)
    cleanup.callback(rebuilder.close)
    return {
        COPY: copy,
        XOR: partial(rebuilder.read, file, 0, out),
        DOWNLOAD: partial(fetch, cleanup.enter_context(plain_server(directory)), file, out),
        CHECK: check,
    }


def touched(path: Path) -> Buffer:
    """Map a file and read all of its pages."""
    found = map_file(path, path.stat().st_size)
    found.max(initial=0)
    return found


@contextmanager
def plain_server(directory: Path) -> Iterator[int]:
    """Serve the files of a directory with plain aiohttp; yield the port."""
    command = [sys.executable, "-c", SERVER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            yield int(said.split()[3].rsplit(":", 1)[1])
        finally:
            process.terminate()


def fetch(port: int, name: str, out: Buffer) -> None:
    """Fill `out` with the first bytes of a file."""
    connection = HTTPConnection("127.0.0.1", port)
    connection.request("GET", f"/{name}", headers={"Range": f"bytes=0-{len(out) - 1}"})
    response = connection.getresponse()
    view = out.data
    while view:
        view = view[response.readinto(view) or sys.exit("the plain download ended early") :]
    connection.close()


def restore(
    bench: Bench, name: str, checkpointer: sw.Checkpointer, wanted: Tensors, origin: str
) -> None:
    """Measure a restore on all ranks; only rank 0 has tensors to restore."""
    for tensor in wanted.values():
        tensor.zero_()
    bench.measure(name, lambda: checkpointer.restore({"model": wanted}, strict=False))
    report = checkpointer.last_restore
    if report is None or (wanted and not report.origins[origin]):
        raise RuntimeError(f"the step was not restored from {origin}: {report}")


def compare(bench: Bench, mine: Tensors, wanted: Tensors) -> None:
    """Check that the restored values are those saved, by the sum of each tensor's words."""
    tensors = mine if bench.rank == OWNER else wanted
    sums = {name: int(t.view(torch.int32).sum(dtype=torch.int64)) for name, t in tensors.items()}
    everyone = bench.gather_values(sums)
    if everyone[0] != everyone[OWNER]:
        raise RuntimeError("the restored values differ from the saved ones")


def share_of(bench: Bench, rank: int, make: Callable[..., torch.Tensor]) -> Tensors:
    """Return the tensors that only this rank saves."""
    shape = bench.size.nbytes // 4 // bench.size.columns, bench.size.columns
    return {f"rank{rank}.w{i}": make(shape) for i in range(bench.size.tensors // bench.world)}


if __name__ == "__main__":
    main()
