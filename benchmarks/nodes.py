"""Simulated nodes for benchmarks: one per rank, each with a directory in memory and an agent."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import Bench
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.records import AgentInfo

NEVER = 1 << 30


class Nodes:
    """The nodes of all ranks of a benchmark."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._memory = Path(f"/dev/shm/shardwise-{bench.question}")

    def __getitem__(self, rank: int) -> Path:
        """Return the directory of a rank's node."""
        return self._memory / f"node{rank}"

    @contextmanager
    def checkpointer(self, *, group: int = 8) -> Iterator[sw.Checkpointer]:
        """Open this rank's Checkpointer on its node."""
        directory = self[self._bench.rank]
        directory.mkdir(parents=True, exist_ok=True)
        memory = sw.Memory(
            dir=str(directory), parity=1, group=group, slots=2, when_full="wait", rescue=False
        )
        checkpointer = sw.Checkpointer(self._bench.dir / "root", save_every=NEVER, memory=memory)
        try:
            yield checkpointer
        finally:
            checkpointer.close(wait=False)

    def lose(self, rank: int) -> AgentInfo:
        """Kill a node's agent and delete its memory. Returns the agent's record."""
        (info,) = agents_below(self[rank])
        os.kill(info.process, signal.SIGKILL)
        shutil.rmtree(self[rank])
        return info

    def clean(self) -> None:
        """Kill all agents; delete the nodes' memory and the root."""
        dist.barrier()
        if self._bench.rank == 0:
            for info in agents_below(self._memory):
                os.kill(info.process, signal.SIGKILL)
            shutil.rmtree(self._memory, ignore_errors=True)
            shutil.rmtree(self._bench.dir / "root", ignore_errors=True)
        dist.barrier()


def save_protected(checkpointer: sw.Checkpointer, step: int, model: dict[str, object]) -> None:
    """Save a step and wait until it is protected on all ranks."""
    handle = checkpointer.save(step, {"model": model})
    if handle is None:
        raise RuntimeError("a save was skipped instead of waiting for a slot")
    handle.protected()
    dist.barrier()


def agents_below(directory: Path) -> list[AgentInfo]:
    """Return the agents whose memory is in a directory."""
    found = [read_record(path, AgentInfo) for path in directory.glob("**/agent.json")]
    return [info for info in found if info is not None]
