"""Forks ranks on a separate host: `python on_host.py FIFO`. So a host imports torch only once.

Each line of the FIFO is JSON: the arguments of `train_as_rank` and the environment of a new rank,
or "kill", which kills the newest rank, or "wait", which waits for it and prints its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from tests.faults.memory.scenario import Cluster, begin, go_on, train
from tests.tools.agents import until as wait_until

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


def train_as_rank(
    root: str, until: str, step: str = "", sign: str = "", every: str = "1000"
) -> None:
    """Train until a step, with a copy of each snapshot on one other node.

    Each step that is a multiple of `every` is saved to the root. The rank prints as JSON what it
    resumed from, and how many seconds that took. Before the save of `step` it prints "ready" and
    waits for the file `sign`. After the save it prints how each stage ended, and sleeps.
    """
    dist.init_process_group("gloo")
    given = {"copies": 1, "wait": WAIT, "interface": "eth0"}
    cluster = Cluster(root=root, shm=Path("/dev/shm"), every=int(every), options=given)
    started = time.monotonic()
    went = go_on(cluster, int(until))
    seconds = time.monotonic() - started
    print(json.dumps([went.step, went.source, went.skipped, seconds]), flush=True)
    if step:
        save_in_steps(cluster, int(step), Path(sign))


def fork_rank(arguments: list[str], environ: dict[str, str]) -> int:
    """Return the process id of a new rank."""
    child = os.fork()
    if child:
        return child
    os.environ.update(environ)
    try:
        train_as_rank(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve(lines: Iterable[str]) -> None:
    newest = 0
    for line in lines:
        request = json.loads(line)
        if request == "kill":
            os.kill(newest, signal.SIGKILL)
        elif request == "wait":
            print(os.waitstatus_to_exitcode(os.waitpid(newest, 0)[1]), flush=True)
        else:
            newest = fork_rank(*request)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as fifo:
        serve(fifo)
