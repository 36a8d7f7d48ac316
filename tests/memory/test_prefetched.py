"""The agent reads the newest checkpoint of a bucket before the training restores it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.memory.home import Home
from shardwise.memory.lineage import read_or_create_lineage
from shardwise.memory.prefetched import (
    PREFETCH_DIRECTORY,
    Prefetcher,
    parse_ranks,
    prefetched_files,
)
from shardwise.store import LocalStore, open_store
from tests.breadth import mostly_long
from tests.memory.test_agents import living, started
from tests.memory.test_snapshots import shm
from tests.store.servers import Server, moto
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault
from tests.tools.gang import Gang

__all__ = ["moto", "shm"]
ROWS, COLUMNS = 64, 8192
SECONDS = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def values(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.int64).reshape(ROWS, COLUMNS) * (step + 1)


def shards(step: int) -> tuple[dict[str, Any], torch.Tensor, sw.Box]:
    """This rank's rows, as a state, and their values."""
    rank, world = dist.get_rank(), dist.get_world_size()
    box = sw.Box((ROWS // world * rank, 0), (ROWS // world, COLUMNS))
    data = values(step)[box.slices()].clone()
    state = {"t": sw.Shards((ROWS, COLUMNS), torch.int64, [(box, data)]), "step": step}
    return state, data, box


def save(url: str, *steps: int) -> None:
    read_or_create_lineage(open_store(url))  # the agent prefetches only for runs with snapshots
    with sw.Checkpointer(url, memory=None) as checkpointer:
        for step in steps:
            checkpointer.save(step, shards(step)[0])


def restore(url: str, shm: Path, step: int) -> dict[str, int]:
    """Restore a step, and compare all bytes; return how many bytes came from where."""
    memory = sw.Memory(dir=str(shm), start_agent=False, wait=20.0)
    state, data, box = shards(0)
    with sw.Checkpointer(url, memory=memory) as checkpointer:
        assert checkpointer.restore(state) == step
        assert torch.equal(data, values(step)[box.slices()])
        assert state["step"] == step
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.source == "storage"
        assert not list(
            shm.glob(f"*/{PREFETCH_DIRECTORY}")
        )  # the memory is free before it is needed
        return {k: v for k, v in checkpointer.last_restore.origins.items() if v}


def prefetched(shm: Path) -> list[str]:
    """Return the names of the complete files."""
    return sorted(path.name for path in shm.glob(f"*/{PREFETCH_DIRECTORY}/[!.]*/*.safetensors"))


@pytest.fixture
def url(moto: Server, gang: Gang) -> str:
    """A root with two steps of two ranks."""
    url = moto.new_url()
    gang.run(save, url, 1, 2, world=2)
    return url


@pytest.mark.parametrize("ranks", mostly_long([None, "1", "7-9"], ["1"]))
def test_a_restore_takes_what_the_agent_has_read(
    gang: Gang, url: str, shm: Path, ranks: str | None
) -> None:
    options = ["--prefetch", url, *(["--ranks", ranks] if ranks else [])]
    count = {None: 2, "1": 1, "7-9": 0}[ranks]
    with started(shm, *options):
        living(shm)
        until(lambda: len(prefetched(shm)) == count)
        origins = gang.run(restore, url, shm, 2, world=2)
    nbytes = values(0).nbytes // 2
    for rank, found in enumerate(origins):
        here = ranks is None or (ranks == "1" and rank == 1)
        assert (found.get("prefetched", 0) >= nbytes) == here, origins
        assert (found.get("root", 0) >= nbytes) == (not here), origins


def test_damaged_and_incomplete_files_are_read_from_the_root(
    gang: Gang, url: str, shm: Path
) -> None:
    with started(shm, "--prefetch", url):
        living(shm)
        until(lambda: len(prefetched(shm)) == 2)
        first, second = sorted(shm.glob(f"*/{PREFETCH_DIRECTORY}/[!.]*/*.safetensors"))
        data = bytearray(first.read_bytes())
        data[70_000] ^= 1
        first.write_bytes(data)
        second.write_bytes(second.read_bytes()[:100_000])
        origins = gang.run(restore, url, shm, 2, world=2)
    assert all(found["root"] > 0 for found in origins)


def test_a_restore_does_not_wait_for_the_agent(
    moto: Server, gang: Gang, url: str, shm: Path
) -> None:
    with FaultProxy(moto.endpoint) as proxy:
        slow = re.sub(r"endpoint=[^&]*", f"endpoint={proxy.url}", url)
        proxy.inject(HttpFault(FaultKind.HANG, count=None, path="safetensors"))
        with started(shm, "--prefetch", slow):
            living(shm)
            until(lambda: any(request.fault for request in proxy.requests))
            (origins, _) = gang.run(restore, url, shm, 2, world=2)
            assert origins.keys() == {"root"}


def prefetch(home: Home, root: str, kept_seconds: float = 1800.0) -> Prefetcher:
    made = Prefetcher(home, root, kept_seconds=kept_seconds)
    made.start()
    return made


def test_files_are_removed_when_nobody_restores(url: str, shm: Path) -> None:
    home = Home(shm)
    made = prefetch(home, url)
    until(lambda: len(prefetched(shm)) == 2)
    run = home.run(read_or_create_lineage(open_store(url)).run)
    files = prefetched_files(run)
    assert isinstance(files, LocalStore)
    source = open_store(url).at("step-00000002")
    for name in prefetched(shm):
        assert files.read(name, limit=1 << 30) == source.read(name, limit=1 << 30)
    assert made.stop(10.0)
    assert prefetched_files(run) is None
    made = prefetch(home, url, 0.0)
    made._thread.join(SECONDS)
    assert not list(home.path.glob(f"*{PREFETCH_DIRECTORY}*"))


def test_a_root_without_checkpoints_or_server_is_no_failure(moto: Server, shm: Path) -> None:
    home = Home(shm)
    for place in (moto.new_url(), "s3://bucket/run?endpoint=http://127.0.0.1:9&retry=1"):
        made = prefetch(home, place, 0.0)
        made._thread.join(SECONDS)
        assert not made._thread.is_alive()
        assert not list(home.path.glob(f"*{PREFETCH_DIRECTORY}*"))


def test_what_does_not_fit_is_left_out(
    url: str, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_store(url).at("step-00000002")
    largest = max(status.size for status in source.walk(10).values())

    class Usage:
        free = largest * 3  # of which half is used

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    made = prefetch(Home(shm), url)
    until(lambda: prefetched(shm))
    made.stop(10.0)
    assert len(prefetched(shm)) <= 1


def test_ranks_are_checked() -> None:
    assert parse_ranks("8-10") == {8, 9, 10}
    assert parse_ranks(None) is None
    with pytest.raises(sw.StoreError, match="such as 8-15"):
        parse_ranks("1,2")
