"""Other nodes are asked for what they have, waited for, and left out if they are lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

import shardwise as sw
from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MANIFEST, Manifest, encode_manifest
from shardwise.parts.lineage import Lineage, Resumption
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import ABANDONED_MARKER, Home, Run, SnapshotDirectory
from shardwise.parts.memory.records import AgentInfo, PendingManifest
from shardwise.parts.memory.redundancy.parity import encode_parity
from shardwise.parts.memory.redundancy.placement import Member, ProtectionGroup, chunk_size
from shardwise.parts.memory.remote.calls import Caller, StageCall
from shardwise.parts.memory.remote.search import (
    NodeFiles,
    Search,
    list_own_files,
)
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.replies import Replies
from shardwise.parts.memory.times import FIRST_CONNECT_TIMEOUT, LONGEST_WAIT, READ_TIMEOUT
from shardwise.parts.memory.trainer import node_watch
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import free_now
from tests.memory.test_client import dripping
from tests.memory.test_server import RUN, TOKEN, Served, serve, served
from tests.tools.agents import until

# Waiting for the replies of other nodes.

__all__ = ["served"]
SAVE = "0123456789abcdef"
WAIT = 0.3
HERE = AgentInfo("here", "", "")


def pending_of(*infos: AgentInfo, step: int = 10) -> PendingManifest:
    return PendingManifest(
        save_id=SAVE,
        step=step,
        manifest="{}",
        files=[],
        nodes=list(infos),
        leader="here",
        storage=StorageTask(root=""),
    )


def place_of(path: Path, step: int = 10) -> SnapshotDirectory:
    """A snapshot of step 10 on this node, whose directory is there."""
    place = SnapshotDirectory(Run(path / RUN), step, SAVE)
    place.path.mkdir(parents=True)
    return place


def ask(place: SnapshotDirectory, there: AgentInfo, wait: float) -> Replies:
    """What another node says that was called to protect a snapshot."""
    pending = pending_of(HERE, there)
    call = StageCall(pending, "protect", "here", wait)
    nodes = Nodes(place, pending.nodes, "here", wait, timeout=call.timeout)
    with closing(nodes):
        return Caller(nodes, call).call(["there"])


def expecting(served: Served, tmp_path: Path) -> Replies:
    """What a node that was called to protect a snapshot says when it has."""
    place = place_of(tmp_path / "here")
    bound = threading.Timer(20.0, place.abandon)
    bound.start()
    try:
        return ask(place, AgentInfo("there", f"http://127.0.0.1:{served.port}", TOKEN), WAIT)
    finally:
        bound.cancel()


def reply(served: Served, replies: Replies) -> None:
    """Have a node reply to the call that it has received."""
    until(lambda: served.calls.call_of(served.place, "protect") is not None)
    call = served.calls.call_of(served.place, "protect")
    assert call is not None
    served.calls.reply(served.place, "protect", call, replies.encode(SAVE))


def test_a_call_wakes_the_agent(served: Served, tmp_path: Path) -> None:
    """Otherwise each protected snapshot takes as long as the agent's pause between two looks."""
    served.fill("x", b"")
    timer = threading.Timer(WAIT, reply, (served, Replies.of_node(1, 7, {})))
    timer.start()
    expecting(served, tmp_path)
    assert served.wakes


def test_who_was_called_is_waited_for_as_long_as_it_may_take(
    served: Served, tmp_path: Path
) -> None:
    served.fill("x", b"")
    timer = threading.Timer(4 * WAIT, reply, (served, Replies.of_node(1, 7, {})))
    timer.start()
    replies = expecting(served, tmp_path)
    assert (replies.nodes.tolist(), replies.nbytes.tolist()) == ([1], [7])
    assert not replies.lost


def test_who_does_not_have_the_snapshot_yet_is_called_again(served: Served, tmp_path: Path) -> None:
    """Its ranks begin the save a little later."""
    threading.Timer(WAIT / 2, served.fill, ("x", b"")).start()
    timer = threading.Timer(WAIT / 2, reply, (served, Replies.of_node(1, 7, {})))
    timer.start()
    assert expecting(served, tmp_path).nodes.tolist() == [1]


def test_who_never_has_the_snapshot_is_lost(served: Served, tmp_path: Path) -> None:
    replies = expecting(served, tmp_path)
    assert "node there did not do its part of protect of step 10" in replies.lost["there"]


def test_who_does_not_answer_is_lost(tmp_path: Path) -> None:
    with silent() as port:
        there = AgentInfo("there", f"http://127.0.0.1:{port}", TOKEN)
        replies = ask(place_of(tmp_path), there, WAIT)
    assert list(replies.lost) == ["there"]
    assert "node there did not do its part of protect of step 10" in replies.lost["there"]


@pytest.mark.parametrize("how", ["abandoned", "freed", "vanished"])
def test_who_has_discarded_a_snapshot_is_not_waited_for(
    served: Served, tmp_path: Path, how: str
) -> None:
    """As it went on without the one who waits, from an older step."""

    def discard() -> None:
        if how == "abandoned":
            served.place.abandon()
        else:
            free_now(served.place)

    served.fill("x", b"")
    if how == "freed":
        served.fill(records.STATE, b"{}")
    threading.Timer(4 * WAIT, discard).start()
    started = time.monotonic()
    replies = expecting(served, tmp_path)
    assert "node there has discarded step 10" in replies.lost["there"]
    assert 3 * WAIT < time.monotonic() - started < 19.0


def test_an_invalid_reply_is_not_waited_for_again(served: Served, tmp_path: Path) -> None:
    """Its index is of no node of the save."""
    served.fill("x", b"")
    timer = threading.Timer(WAIT / 2, reply, (served, Replies.of_node(2, 7, {})))
    timer.start()
    assert "a reply about save" in expecting(served, tmp_path).lost["there"]


def test_work_on_a_file_that_another_node_has_discarded_is_not_repeated(
    served: Served, tmp_path: Path
) -> None:
    """The agent does one thing after another: newer snapshots would wait for their protection."""
    place = place_of(tmp_path / "here")
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
    place, newer = place_of(tmp_path), place_of(tmp_path, 11)
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
            write_record(newer.path / records.PENDING, pending_of(here, step=11))

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
    place = place_of(tmp_path / "here")
    with lost() as port:
        infos = [AgentInfo("here", "", ""), AgentInfo("there", f"http://127.0.0.1:{port}", TOKEN)]
        with closing(Nodes(place, infos, "here", 60.0)) as nodes:
            threading.Timer(0.3, place.abandon).start()
            started = time.monotonic()
            with pytest.raises(sw.StoreError, match="step 10 is abandoned"):
                nodes.retry(lambda: nodes.read("there", MANIFEST, limit=1))
            assert 0.25 < time.monotonic() - started < 4.5  # of 60, or 5
        with pytest.raises(sw.StoreError, match="step 10 is abandoned"):
            ask(place, infos[1], 60.0)
        (place.path / ABANDONED_MARKER).unlink()
        threading.Timer(0.3, place.abandon).start()
        started = time.monotonic()
        with pytest.raises(sw.StoreError, match="step 10 is abandoned"):
            ask(place, infos[1], 60.0)
        assert 0.25 < time.monotonic() - started < 4.5


def test_answers_count_though_this_process_did_not_run_until_the_time_had_passed() -> None:
    with silent() as listening, unreachable() as lost:
        nodes = {"silent": ("127.0.0.1", listening), "lost": ("127.0.0.1", lost)}
        assert list(node_watch._why_unreachable(nodes, 0.0)) == ["lost"]


# Nodes that no rank is on any more: found, though only others know of them.

EMPTY = Manifest(
    save_id=SAVE, step=3, created="now", world_size=1, files=(), objects=(), tensors=Raw(b"[]")
)


def test_nodes_are_found_that_only_others_know(tmp_path: Path) -> None:
    """A run that comes back to a node which was idle knows of the last nodes only in part."""
    with ExitStack() as served:
        homes = {node: Home(tmp_path / node) for node in ("b", "c")}
        ports = {node: served.enter_context(serve(home.path)).port for node, home in homes.items()}
        infos = {node: AgentInfo(node, f"http://127.0.0.1:{ports[node]}", TOKEN) for node in homes}
        nowhere = AgentInfo("c", "http://127.0.0.1:1", TOKEN)  # where its agent was before
        together = pending([AgentInfo("a", "", ""), infos["b"], infos["c"]])
        for home in homes.values():
            place = SnapshotDirectory(home.run(RUN), 3, SAVE)
            place.path.mkdir(parents=True)
            write_record(place.path / records.PENDING, together)
        held = [NodeFiles("a", {}, [infos["b"], nowhere])]
        search = Search(Home(tmp_path).run(RUN), "a", held, {"a": AgentInfo("a", "", "")})
        search.ask()
    assert [each.node for each in search.nodes] == ["a", "b", "c"]
    assert all(list(each.snapshots) == [f"step-00000003-{SAVE}"] for each in search.nodes[1:])
    assert search.infos["c"] == infos["c"]


def test_no_connection_stays_open_to_a_node_that_has_answered(tmp_path: Path) -> None:
    """A search may ask more nodes than a process can have open files."""
    home = Home(tmp_path)
    SnapshotDirectory(home.run(RUN), 3, SAVE).path.mkdir(parents=True)
    with serve(home.path, most=200) as served:
        url = f"http://127.0.0.1:{served.port}"
        infos = {f"n{each}": AgentInfo(f"n{each}", url, TOKEN) for each in range(400)}
        search = Search(home.run(RUN), "a", [], infos)
        search.ask()
    assert len(search.nodes) == 400


def test_a_node_that_is_off_is_waited_for_only_while_its_answer_is_needed(
    tmp_path: Path,
) -> None:
    def knowing(port: int) -> Search:
        held = [NodeFiles("a", {}, [AgentInfo("b", f"http://127.0.0.1:{port}", TOKEN)])]
        return Search(Home(tmp_path).run(RUN), "a", held, {"a": AgentInfo("a", "", "")})

    with silent() as port:
        search, start = knowing(port), time.monotonic()
        search.ask(lambda: True)
        assert [each.node for each in search.nodes] == ["a"]
        assert time.monotonic() - start < READ_TIMEOUT
    with unreachable() as port:
        search, start = knowing(port), time.monotonic()
        search.ask()
        assert [each.node for each in search.nodes] == list(search.infos) == ["a"]
        assert FIRST_CONNECT_TIMEOUT <= time.monotonic() - start < LONGEST_WAIT / 2


def test_a_node_that_sends_one_byte_at_a_time_is_left_out_at_the_end_of_the_search(
    tmp_path: Path,
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 60000000\r\n\r\n"
    with dripping(head) as slow, serve(tmp_path / "c") as served:
        quick = AgentInfo("c", f"http://127.0.0.1:{served.port}", TOKEN)
        held = [NodeFiles("a", {}, [replace(slow, node="b"), quick])]
        infos, run = {"a": AgentInfo("a", "", "")}, Home(tmp_path).run(RUN)
        start = time.monotonic()
        search = Search(run, "a", held, infos, deadline=Deadline(1.0))
        search.ask()
        assert [each.node for each in search.nodes] == ["a", "c"]
        read = Search(run, "a", [], {"b": slow}, deadline=Deadline(1.0)).read
        for _ in range(3):  # it is asked once
            with pytest.raises(StoreError, match="no complete answer"):
                read("b", SnapshotDirectory(run, 3, SAVE), MANIFEST)
        assert 1.8 < time.monotonic() - start < 10.0


def committed(home: Home, step: int, epoch: int) -> NodeFiles:
    """A node that has all of a snapshot, which was saved in an epoch."""
    place = SnapshotDirectory(home.run(RUN), step, SAVE)
    place.path.mkdir(parents=True, exist_ok=True)
    (place.path / MANIFEST).write_bytes(encode_manifest(EMPTY))
    write_record(place.path / records.PENDING, replace(pending([]), epoch=epoch))
    return list_own_files(home.run(RUN), "a")


@pytest.mark.parametrize("resumptions", [(), (Resumption(1, 3),)])
def test_who_was_there_last_knows_of_all_that_is_newer(
    tmp_path: Path, resumptions: tuple[Resumption, ...]
) -> None:
    """A run that was restored elsewhere since may have gone on from there."""
    home = Home(tmp_path)
    lineage = Lineage(RUN, resumptions)

    def is_enough(held: NodeFiles, **wanted: int | None) -> bool:
        infos = {"a": AgentInfo("a", "", "")}
        search = Search(home.run(RUN), "a", [held], infos, lineage=lineage)
        return search.is_complete(wanted.get("step"))

    assert not is_enough(NodeFiles("a", {}, []))
    old = committed(home, 3, epoch=0)
    assert is_enough(old) == (not resumptions)
    new = committed(home, 3, epoch=lineage.epoch)
    assert is_enough(new)
    assert is_enough(new, step=3)
    assert not is_enough(new, step=4)
    SnapshotDirectory(
        home.run(RUN), 4, SAVE
    ).path.mkdir()  # another node may have what this one lacks of it
    assert not is_enough(list_own_files(home.run(RUN), "a"))


def pending(nodes: list[AgentInfo]) -> PendingManifest:
    """Of step 3, on these nodes."""
    return PendingManifest(
        save_id=SAVE,
        step=3,
        manifest="",
        files=[],
        nodes=nodes,
        leader="a",
        storage=StorageTask(root=""),
    )


def test_a_file_that_vanishes_as_others_look_hides_no_snapshot(tmp_path: Path) -> None:
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1, SAVE)
    place.path.mkdir(parents=True)
    place.manifest_path.write_bytes(b"{}")
    (place.path / ".note.json.0badf00d").symlink_to("nowhere")  # as one that is gone by now
    assert list_own_files(place.run, "n").snapshots == {place.name: {"manifest.json": 2}}
