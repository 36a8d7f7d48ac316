"""A rank on a separate host: `python on_host.py ROOT UNTIL [STEP SIGN [EVERY]]`.

It trains until a step, and keeps a copy on one other node. Each step that is a multiple of `EVERY`
is saved to the root. It prints as JSON what it resumed from, and how many seconds that took. Before
the save of `STEP` it prints "ready" and waits for the file `SIGN`. After the save it prints how
each stage ended, and sleeps until it is killed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from tests.faults.memory.scenario import Cluster, begin, go_on, train
from tests.faults.memory.scenario import until as wait_until

WAIT = 3.0


def outcome(stage: Callable[[float], None]) -> tuple[str, float]:
    """Return the error of a stage ("" if none), and its seconds."""
    started = time.monotonic()
    try:
        stage(60.0)
    except (sw.ShardwiseError, TimeoutError) as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def save_in_steps(cluster: Cluster, step: int, sign: Path) -> None:
    """Save a step, and print how each of its stages ends."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    train(values, step)
    state["step"] = step
    print("ready", flush=True)
    wait_until(sign.exists, 30.0)
    handle = cp.save(step, state)
    assert handle is not None
    for stage in (handle.committed, handle.protected):
        print(json.dumps(outcome(stage)), flush=True)
    time.sleep(60.0)


def main(root: str, until: str, step: str = "", sign: str = "", every: str = "1000") -> None:
    dist.init_process_group("gloo")
    given = {"copies": 1, "wait": WAIT, "interface": "eth0"}
    cluster = Cluster(root=root, shm=Path("/dev/shm"), every=int(every), options=given)
    started = time.monotonic()
    went = go_on(cluster, int(until))
    seconds = time.monotonic() - started
    print(json.dumps([went.step, went.source, went.skipped, seconds]), flush=True)
    if step:
        save_in_steps(cluster, int(step), Path(sign))


if __name__ == "__main__":
    main(*sys.argv[1:])
