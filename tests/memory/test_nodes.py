"""Waiting for records of other nodes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.memory import records
from shardwise.memory.files import encode_record, listen_to_bell, write_record
from shardwise.memory.home import Home, Run, SnapshotDirectory, new_run_id
from shardwise.memory.records import AgentInfo, PendingManifest, StageOutcome, StorageTask
from shardwise.memory.redundancy.parity import encode_parity
from shardwise.memory.redundancy.placement import Member, ProtectionGroup, chunk_size
from shardwise.memory.remote.nodes import Nodes, run_on_nodes
from shardwise.memory.trainer import node_watch
from tests.memory.test_server import RUN, TOKEN, Served, served

__all__ = ["served"]
SAVE = "f" * 16
REQUEST, DONE = (
    records.save_record("protect", SAVE),
    records.save_record("protect", SAVE, "done"),
)
WAIT = 0.3


def expecting(served: Served, tmp_path: Path, *, asked: str) -> StageOutcome:
    """What a node that was asked to protect a snapshot says when it has."""
    place = SnapshotDirectory(Run(tmp_path / "here" / RUN), 10)
    infos = [
        AgentInfo("here", "", ""),
        AgentInfo("there", f"http://127.0.0.1:{served.port}", TOKEN),
    ]
    place.path.mkdir(parents=True)
    bound = threading.Timer(5.0, place.abandon)
    bound.start()
    try:
        with closing(Nodes(place, infos, "here", WAIT)) as nodes:
            return nodes.wait_for_record("there", DONE, StageOutcome, request_name=asked)
    finally:
        bound.cancel()


def test_a_record_for_this_node_wakes_its_agent(tmp_path: Path) -> None:
    """Otherwise each protected snapshot takes as long as the agent's pause between two looks."""
    home, woken = Home(tmp_path), threading.Event()
    place = SnapshotDirectory(home.run(new_run_id()), 10)
    place.path.mkdir(parents=True)
    os.mkfifo(home.bell_path)
    threading.Thread(target=listen_to_bell, args=(home.bell_path, woken.set), daemon=True).start()
    with closing(Nodes(place, [AgentInfo("here", "", "")], "here", WAIT)) as nodes:
        while not woken.wait(0.01):  # until the thread listens
            nodes.write("here", REQUEST, b"{}")


def test_who_was_asked_is_waited_for_as_long_as_it_may_take(served: Served, tmp_path: Path) -> None:
    served.fill(REQUEST, b"{}")
    done = encode_record(StageOutcome(save_id=SAVE, stage="protect", bytes=7))
    timer = threading.Timer(4 * WAIT, served.fill, (DONE, done))
    timer.start()
    assert expecting(served, tmp_path, asked=REQUEST).bytes == 7
    with pytest.raises(sw.StoreError, match="did not provide entry"):
        Nodes(
            SnapshotDirectory(Run(tmp_path), 10), [AgentInfo("here", "", "")], "here", WAIT
        ).wait_for_record("here", "entry", StageOutcome)


def test_who_has_discarded_a_snapshot_is_not_waited_for(served: Served, tmp_path: Path) -> None:
    """As it went on without the one who waits, from an older step."""
    served.fill(REQUEST, b"{}")
    timer = threading.Timer(4 * WAIT, (served.step / REQUEST).unlink)
    timer.start()
    started = time.monotonic()
    with pytest.raises(sw.StoreError, match="node there has discarded step 10"):
        expecting(served, tmp_path, asked=REQUEST)
    assert 3 * WAIT < time.monotonic() - started < 20.0


def test_work_on_a_file_that_another_node_has_discarded_is_not_repeated(
    served: Served, tmp_path: Path
) -> None:
    """The agent does one thing after another: newer snapshots would wait for their protection."""
    place = SnapshotDirectory(Run(tmp_path / "here" / RUN), 10)
    place.path.mkdir(parents=True)
    infos = [
        AgentInfo("here", "", ""),
        AgentInfo("there", f"http://127.0.0.1:{served.port}", TOKEN),
    ]
    group = ProtectionGroup(
        (
            Member("here", "a", ()),
            Member("there", "b", (("r00001.safetensors", 1 << 20),)),
            Member("elsewhere", "c", ()),
        ),
        parity=1,
        chunk=chunk_size([0, 1 << 20, 0], 3, 1),
    )
    with closing(Nodes(place, infos, "here", 60.0)) as nodes:
        started = time.monotonic()
        with pytest.raises(sw.StoreError, match=r"cannot compute parity: cannot read r00001.*not"):
            nodes.retry(lambda: encode_parity(group, 0, 0, nodes.read_range, lambda *_: None))
        assert time.monotonic() - started < 30


def test_work_on_a_file_of_a_node_that_the_run_left_behind_is_not_repeated(tmp_path: Path) -> None:
    """The node does not answer, and the protection of newer snapshots waits for this work."""
    run = Run(tmp_path / RUN)
    place, newer = SnapshotDirectory(run, 10), SnapshotDirectory(run, 11)
    for each in (place, newer):
        each.path.mkdir(parents=True)
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        gone = AgentInfo("gone", f"http://127.0.0.1:{refusing.getsockname()[1]}", TOKEN)
        here = AgentInfo("here", "", "")
        group = ProtectionGroup(
            (
                Member("here", "a", ()),
                Member("gone", "b", (("r00001.safetensors", 1 << 20),)),
                Member("elsewhere", "c", ()),
            ),
            parity=1,
            chunk=chunk_size([0, 1 << 20, 0], 3, 1),
        )

        def continue_without_it() -> None:
            pending = PendingManifest(
                save_id=SAVE,
                step=11,
                manifest="{}",
                files=[],
                nodes=[here],
                leader="here",
                storage=StorageTask(root=""),
            )
            write_record(newer.path / records.save_record("pending", SAVE), pending)

        timer = threading.Timer(2 * WAIT, continue_without_it)
        timer.start()
        started = time.monotonic()
        with (
            closing(Nodes(place, [here, gone], "here", 60.0)) as nodes,
            pytest.raises(sw.StoreError, match="the run continued without node gone"),
        ):
            nodes.retry(lambda: encode_parity(group, 0, 0, nodes.read_range, lambda *_: None))
        assert WAIT < time.monotonic() - started < 30


@contextmanager
def unreachable() -> Iterator[int]:
    """The port of a host that takes no connection and refuses none, as one that is off."""
    with socket.socket() as listener, ExitStack() as waiting:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            line = waiting.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextmanager
def silent() -> Iterator[int]:
    """The port of an agent that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("lost", [unreachable, silent])
def test_work_on_an_abandoned_snapshot_ends_at_once(
    lost: Callable[[], AbstractContextManager[int]], tmp_path: Path
) -> None:
    """A restore waits for it, and the node that it waits for may be the one that was lost."""
    place = SnapshotDirectory(Run(tmp_path / "here" / RUN), 10)
    place.path.mkdir(parents=True)
    with lost() as port:
        infos = [AgentInfo("here", "", ""), AgentInfo("there", f"http://127.0.0.1:{port}", TOKEN)]
        with closing(Nodes(place, infos, "here", 60.0)) as nodes:
            threading.Timer(0.3, place.abandon).start()
            started = time.monotonic()
            with pytest.raises(sw.StoreError, match="step 10 is abandoned"):
                nodes.wait_for_record("there", DONE, StageOutcome)
            assert 0.25 < time.monotonic() - started < 4.5  # of 60, or 5
            with pytest.raises(sw.StoreError, match="step 10 is abandoned"):
                nodes.write_to_others((REQUEST, b"{}"))


def test_answers_count_though_this_process_did_not_run_until_the_time_had_passed() -> None:
    with silent() as listening, unreachable() as lost:
        nodes = {"silent": ("127.0.0.1", listening), "lost": ("127.0.0.1", lost)}
        assert list(node_watch._why_unreachable(nodes, 0.0)) == ["lost"]


def test_many_nodes_are_talked_to_at_a_time() -> None:
    together = threading.Barrier(8, timeout=20)
    names = [f"n{i}" for i in range(8)]

    def work(node: str) -> str:
        together.wait()
        return node.upper()

    assert list(run_on_nodes(names, work).items()) == [(name, name.upper()) for name in names]


def test_what_fails_of_one_node_is_raised_when_the_others_have_ended() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(node: str) -> None:
        if node == "bad":
            begun.wait(20)
            raise sw.StoreError("bad is lost")
        begun.set()
        time.sleep(0.1)
        ended.set()

    with pytest.raises(sw.StoreError, match="bad is lost"):
        run_on_nodes(["bad", "good"], work)
    assert ended.is_set()
