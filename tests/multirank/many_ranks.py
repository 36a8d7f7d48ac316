"""A program whose processes save and load as hundreds of ranks, without a process group of torch.

    python -m tests.multirank.many_ranks FOLDER FAN_OUT SAVING_RANKS LOADING_RANKS KILLED_RANK…

The processes are forked from this one, which has imported everything and has no threads. It prints
a line of JSON for each phase: for each rank, "" or its error, and the monotonic time then.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.engine import save as engine_save
from shardwise.parts.ranks import tree
from tests import preloaded  # noqa: F401 - forked processes need not import

Act = Callable[[sw.TreeGroup], None]
COLUMNS = 32
TIMEOUT = timedelta(seconds=100)
STAGING_BYTES = 1 << 20


def rows_of(rank: int, ranks: int, rows: int) -> tuple[int, int]:
    """The rows that a rank holds; some ranks hold one more than others."""
    return rank * rows // ranks, (rank + 1) * rows // ranks


def values(low: int, high: int) -> torch.Tensor:
    """Rows of a tensor without two equal elements."""
    return torch.arange(low * COLUMNS, high * COLUMNS, dtype=torch.float32).reshape(-1, COLUMNS)


def state_of(rank: int, ranks: int, rows: int, *, filled: bool) -> dict[str, Any]:
    low, high = rows_of(rank, ranks, rows)
    part = values(low, high) if filled else torch.zeros(high - low, COLUMNS)
    box = sw.Box((low, 0), tuple(part.shape))
    replica = torch.arange(1000.0) if filled else torch.zeros(1000)
    return {
        "sharded": sw.Shards((rows, COLUMNS), torch.float32, [(box, part)]),
        "replica": replica,
        "step": 7 if filled else 0,
        "rank": sw.PerRank(rank),
    }


def save(group: sw.TreeGroup, place: Path, rows: int) -> None:
    state = state_of(group.rank, group.size, rows, filled=True)
    sw.save(place, state, group=group, staging_bytes=STAGING_BYTES)


def load(group: sw.TreeGroup, place: Path, rows: int) -> None:
    state = state_of(group.rank, group.size, rows, filled=False)
    (fragment,) = state["sharded"].fragments
    del state["rank"]
    sw.load(place, state, group=group, staging_bytes=STAGING_BYTES)
    expected = state_of(group.rank, group.size, rows, filled=True)
    assert bytes_of(fragment.data) == bytes_of(values(*rows_of(group.rank, group.size, rows)))
    assert bytes_of(state["replica"]) == bytes_of(expected["replica"])
    assert state["step"] == 7


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def save_and_kill(group: sw.TreeGroup, place: Path, rows: int, killed: int) -> None:
    if group.rank == killed:
        engine_save.write_data_file = lambda *_: die(place)
    save(group, place, rows)


def die(place: Path) -> None:
    (place.parent / "died").write_text(str(time.monotonic()), encoding="utf-8")
    os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(
    name: str, ranks: int, folder: Path, function: Callable[[sw.TreeGroup], None]
) -> None:
    """Run a function on some ranks, and print what went wrong."""
    rendezvous = str(folder / name.replace(" ", "-"))
    reader, writer = os.pipe()
    processes = []
    gc.freeze()
    for rank in range(ranks):
        if not (process := os.fork()):
            os.close(reader)
            with open(writer, "w", encoding="utf-8") as pipe:
                pipe.write(run_rank(rank, ranks, rendezvous, function))
            os._exit(0)
        processes.append(process)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        outcomes = [json.loads(line) for line in pipe]
    for process in processes:
        os.waitpid(process, 0)
    died = folder / "died"
    when = float(died.read_text(encoding="utf-8")) if died.exists() else None
    print(json.dumps({"name": name, "outcomes": outcomes, "died": when}), flush=True)


def run_rank(rank: int, ranks: int, rendezvous: str, function: Act) -> str:
    error = ""
    try:
        store = dist.FileStore(rendezvous, ranks)
        with sw.TreeGroup(store, rank, ranks, timeout=TIMEOUT) as group:
            function(group)
    except sw.LostRankError as lost:
        error = f"lost {sorted(lost.failures)}"
    except BaseException:
        error = traceback.format_exc()[-2000:]
    return json.dumps([rank, error, time.monotonic()]) + "\n"


def main() -> None:
    folder = Path(sys.argv[1])
    tree.FAN_OUT, saving, loading, *lost = map(int, sys.argv[2:])
    torch.set_num_threads(1)
    rows = 3 * saving + 1
    good, bad = folder / "good", folder / "bad"
    run_ranks("save", saving, folder, lambda group: save(group, good, rows))
    run_ranks("load", loading, folder, lambda group: load(group, good, rows))
    for killed in lost:
        name = f"kill {killed}"
        run_ranks(name, saving, folder, lambda g, k=killed: save_and_kill(g, bad, rows, k))
    run_ranks("load again", 2, folder, lambda group: load(group, good, rows))


if __name__ == "__main__":
    main()
