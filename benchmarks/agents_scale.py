"""What a save costs the agent that leads it, in runs of up to 2,048 nodes with 8 ranks each.

    python -m benchmarks.agents_scale [NODES …]

The agent of the leading node is real. All other nodes are simulated (`simulated_nodes.py`).
"""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Raw

from benchmarks.simulated_nodes import RANKS, SAVE, TOKEN, make_file, name_of_node, simulate
from shardwise.kernel.manifest.manifest import (
    Manifest,
    ObjectEntry,
    data_file,
    encode_manifest,
    step_directory,
)
from shardwise.kernel.store import LocalStore
from shardwise.parts.lineage import read_or_create_lineage
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.agent.process import make_agent
from shardwise.parts.memory.agent.server import Served, create_app, serve_connections
from shardwise.parts.memory.files import listen_to_bell, write_record
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import read_state
from shardwise.parts.tiers.options import StorageTask

NODES = (64, 1024, 2048)
STEP = 10
STAGES = ("commit", "protect", "persist")
IDLE_SECONDS = 10.0
MANIFEST_BYTES_PER_RANK = 256
"""About as many as a manifest has whose tensors are described by rule."""


def main() -> None:
    rows = [measure(int(each)) for each in sys.argv[1:] or NODES]
    print(json.dumps(rows, indent=1))


def measure(nodes: int) -> dict[str, object]:
    """Save once with this many nodes, and return what that cost the leading agent."""
    scratch = Path(tempfile.mkdtemp(prefix="agents-scale-"))
    try:
        root = scratch / "root"
        stored = root / step_directory(STEP)
        stored.mkdir(parents=True)
        home = Home(scratch)
        run = home.run(read_or_create_lineage(LocalStore(root)).run)
        place = SnapshotDirectory(run, STEP, SAVE)
        follower = Follower(name_of_node(0), MappedFiles())
        agent, _ = make_agent(home, follower)
        port = serve(home, follower, agent.wake)
        with simulate(nodes, stored, port, run.name, place.name) as (infos, counts):
            own = AgentInfo(follower.node, f"http://127.0.0.1:{port}", TOKEN)
            threading.Thread(
                target=listen_to_bell, args=(home.bell_path, agent.wake), daemon=True
            ).start()
            agent.start()
            time.sleep(1.5)
            counts.send(None)
            counts.recv()
            cpu, start = time.process_time(), time.monotonic()
            stage_files(place, nodes, [own, *infos], root)
            agent.wake()
            seconds = wait_for_end(place, start)
            time.sleep(0.5)  # the nodes below learn the last outcome
            cpu = time.process_time() - cpu
            counts.send(None)
            saved = counts.recv()
            time.sleep(IDLE_SECONDS)
            counts.send(None)
            idle = counts.recv()
            agent.stop(5.0)
        return {
            "nodes": nodes,
            "ranks": nodes * RANKS,
            "nodes asked": len(saved.nodes),
            "requests": sum(saved.requests.values()),
            "MB sent": round(saved.received / 1e6, 2),
            "MB received": round(saved.sent / 1e6, 2),
            "CPU seconds": round(cpu, 2),
            "seconds": {stage: round(each, 2) for stage, each in seconds.items()},
            "requests a minute when idle": sum(idle.requests.values()) * 60 / IDLE_SECONDS,
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            "by kind": saved.requests,
            "by kind when idle": idle.requests,
        }
    finally:
        shutil.rmtree(scratch)


def serve(home: Home, follower: Follower, wake: Callable[[], None]) -> int:
    """Serve the leading node in a thread, and return the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    calls, states = follower.calls, follower.states
    served = Served(home=home.path, token=TOKEN, wake=wake, calls=calls, states=states)

    async def serve_forever() -> None:
        async with serve_connections(create_app(served), listener):
            await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve_forever()), daemon=True).start()
    return int(listener.getsockname()[1])


def wait_for_end(place: SnapshotDirectory, start: float) -> dict[str, float]:
    """Wait for the outcomes of all stages, and return the seconds until each."""
    seconds: dict[str, float] = {}
    while len(seconds) < len(STAGES):
        for stage in STAGES:
            done = read_state(place).outcomes.get(stage)
            if done is not None and stage not in seconds:
                seconds[stage] = time.monotonic() - start
                if done.failure:
                    raise RuntimeError(f"{stage}: {done.failure}")
        time.sleep(0.005)
    return seconds


def stage_files(place: SnapshotDirectory, nodes: int, infos: list[AgentInfo], root: Path) -> None:
    """Write what the ranks of the leading node leave to its agent."""
    place.path.mkdir(parents=True)
    for rank in range(RANKS):
        data, entry = make_file(rank)
        part = RankPart(file=entry, snapshots_to_keep=2, stages=STAGES, epoch=0)
        write_record(place.path / records.rank_record(rank), part)
        (place.path / entry.name).write_bytes(data)
    filler = "x" * (MANIFEST_BYTES_PER_RANK * nodes * RANKS)
    manifest = Manifest(
        save_id=SAVE,
        step=STEP,
        created="2026-01-01T00:00:00Z",
        world_size=nodes * RANKS,
        files=(),
        objects=(ObjectEntry("filler", filler),),
        tensors=Raw(b"[]"),
    )
    pending = PendingManifest(
        save_id=SAVE,
        step=STEP,
        manifest=encode_manifest(manifest).decode(),
        files=[(data_file(rank, SAVE), infos[rank // RANKS].node) for rank in range(nodes * RANKS)],
        nodes=infos,
        leader=infos[0].node,
        storage=StorageTask(root=str(root)),
        durable=True,
        copies=1,
    )
    write_record(place.path / records.PENDING, pending)


if __name__ == "__main__":
    main()
