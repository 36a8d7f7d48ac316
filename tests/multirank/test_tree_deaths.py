"""A rank of a tree that dies at any moment is known to all others within seconds."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.engine.rounds import Round
from shardwise.parts.ranks import tree, tree_rendezvous
from shardwise.parts.ranks.tree_links import Link
from shardwise.parts.ranks.tree_rendezvous import RankListener
from tests.breadth import mostly_long
from tests.tools.gang import Gang

WORLD = 4  # rank 0 has 1 and 2 below it, and rank 1 has 3
TIMEOUT = timedelta(seconds=40)
CONNECT_TIMEOUT = timedelta(seconds=3)
SOON = 20.0  # on a busy machine, and long before the timeout


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once_all_have_connected(
    listener: RankListener, connection: socket.socket, peer: object
) -> list[Link]:
    """A rank that connects later would wait for a new address until the time-out."""
    listener.missing.pop()
    listener._cleanup.callback(connection.close)
    if not listener.missing:
        die()
    return []


def die_in_the_middle_of_a_message(link: Link) -> None:
    if not link._outgoing:
        return
    first = link._outgoing[1]
    link._connection.setblocking(True)
    link._connection.sendall(link._outgoing[0])
    link._connection.sendall(first[: len(first) // 2])
    die()


MOMENTS = (
    *("before it connects", "while it connects", "in training", "while it waits"),
    "in the middle of a message",
)


def meet(moment: str, lost: int) -> tuple[str, list[int], float]:
    """Take part in rounds. Return what went wrong, which ranks are named, and when."""
    rank = dist.get_rank()
    dies = rank == lost
    if dies and moment == "before it connects":
        die()
    if dies and moment == "while it connects":
        tree_rendezvous._receive_answer = lambda *_: die()
        RankListener._answer = die_once_all_have_connected
    timeout = CONNECT_TIMEOUT if moment == "before it connects" else TIMEOUT
    began = time.monotonic()
    try:
        with patch.object(tree, "FAN_OUT", 2):
            store = dist.distributed_c10d._get_default_store()
            group = sw.TreeGroup(store, rank, WORLD, timeout=timeout)
        with Round(group, "first"):
            pass
        began = time.monotonic()
        if dies and moment == "in training":
            die()
        if dies and moment == "while it waits":
            threading.Timer(1.0, die).start()
        elif moment == "while it waits" and rank == 2:
            time.sleep(4.0)
        if dies and moment == "in the middle of a message":
            Link._send = die_in_the_middle_of_a_message
        with Round(group, "second") as all_ranks:
            all_ranks.all_gather(bytes(100_000), bytes)
    except sw.RankError as error:
        return type(error).__name__, sorted(error.failures), time.monotonic() - began
    return "", [], time.monotonic() - began


@pytest.mark.parametrize(
    ("moment", "lost"),
    mostly_long(
        [(moment, lost) for moment in MOMENTS for lost in (0, 1, 3)],
        [*((moment, 1) for moment in MOMENTS), ("in training", 0), ("in training", 3)],
    ),
)
def test_a_rank_that_dies_is_known_to_all(gang: Gang, moment: str, lost: int) -> None:
    outcomes = gang.run_outcomes(meet, moment, lost, world=WORLD)
    for outcome in outcomes:
        if outcome.rank == lost:
            assert outcome.kind == "died"
            continue
        kind, named, seconds = outcome.value
        assert (kind, named) == ("LostRankError", [lost]), outcome
        assert seconds < SOON, outcome


def die_with_a_child(path: str) -> tuple[str, float]:
    """Rank 1 dies, but a process that it has forked lives on, as workers of data loaders do."""
    checkpointer = sw.Checkpointer(path, timeout=TIMEOUT, memory=None)
    if dist.get_rank() == 1:
        if not os.fork():
            time.sleep(SOON + 5.0)
            os._exit(0)
        die()
    began = time.monotonic()
    try:
        checkpointer.save(1, {"a": 1})
    except sw.LostRankError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_a_forked_child_does_not_hide_the_death_of_its_rank(gang: Gang, tmp_path: Path) -> None:
    outcomes = gang.run_outcomes(die_with_a_child, str(tmp_path / "root"), world=3)
    assert [outcome.kind for outcome in outcomes] == ["value", "died", "value"]
    for outcome in (outcomes[0], outcomes[2]):
        assert "rank 1: its connection from host " in outcome.value[0]
        assert outcome.value[1] < SOON


def wait_for_one_that_is_suspended(seconds: float) -> float:
    store = dist.distributed_c10d._get_default_store()
    with sw.TreeGroup(store, dist.get_rank(), dist.get_world_size(), timeout=TIMEOUT) as group:
        with Round(group, "first"):
            pass
        began = time.monotonic()
        if group.rank == 1:
            waker = os.fork()
            if waker == 0:
                time.sleep(seconds)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(waker, 0)
        with Round(group, "second") as all_ranks:
            assert all_ranks.all_gather(bytes(1_000_000), bytes) == [bytes(1_000_000)] * group.size
        return time.monotonic() - began


def test_a_suspended_rank_is_waited_for(gang: Gang) -> None:
    assert min(gang.run(wait_for_one_that_is_suspended, 4.0, world=3)) > 3.0
