"""Nodes that no rank is on any more: found, though only others know of them."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec import Raw
from msgspec.structs import replace

from shardwise.deadline import Deadline
from shardwise.errors import StoreError
from shardwise.manifest.manifest import Manifest, encode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.home import Home, SnapshotDirectory
from shardwise.memory.lineage import Lineage, Resumption
from shardwise.memory.records import AgentInfo, PendingManifest, StorageTask
from shardwise.memory.remote.search import (
    CONNECT_TIMEOUT,
    READ_TIMEOUT,
    SEARCH_TIMEOUT,
    NodeFiles,
    Search,
    list_own_files,
)
from tests.memory.test_client import dripping
from tests.memory.test_nodes import silent, unreachable
from tests.memory.test_server import RUN, TOKEN, serve

SAVE = "0" * 16
EMPTY = Manifest(
    save_id=SAVE, step=3, created="now", world_size=1, files=(), objects=(), tensors=Raw(b"[]")
)


@pytest.mark.parametrize(
    "name", [records.save_record("pending", SAVE), records.save_record("pending", SAVE, "copy")]
)
def test_nodes_are_found_that_only_others_know(tmp_path: Path, name: str) -> None:
    """A run that comes back to a node which was idle knows of the last nodes only in part."""
    with ExitStack() as served:
        homes = {node: Home(tmp_path / node) for node in ("b", "c")}
        ports = {node: served.enter_context(serve(home.path)).port for node, home in homes.items()}
        infos = {node: AgentInfo(node, f"http://127.0.0.1:{ports[node]}", TOKEN) for node in homes}
        nowhere = AgentInfo("c", "http://127.0.0.1:1", TOKEN)  # where its agent was before
        together = pending([AgentInfo("a", "", ""), infos["b"], infos["c"]])
        for home in homes.values():
            place = SnapshotDirectory(home.run(RUN), 3)
            place.path.mkdir(parents=True)
            write_record(place.path / name, together)
        held = [NodeFiles("a", {}, [infos["b"], nowhere])]
        search = Search(Home(tmp_path).run(RUN), "a", held, {"a": AgentInfo("a", "", "")})
        search.ask()
    assert [each.node for each in search.nodes] == ["a", "b", "c"]
    assert all(list(each.steps) == [3] for each in search.nodes[1:])
    assert search.infos["c"] == infos["c"]


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
        assert CONNECT_TIMEOUT <= time.monotonic() - start < SEARCH_TIMEOUT / 2


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
                read("b", 3, MANIFEST)
        assert 1.8 < time.monotonic() - start < 10.0


def committed(home: Home, step: int, epoch: int) -> NodeFiles:
    """A node that has all of a snapshot, which was saved in an epoch."""
    place = SnapshotDirectory(home.run(RUN), step)
    place.path.mkdir(parents=True, exist_ok=True)
    (place.path / MANIFEST).write_bytes(encode_manifest(EMPTY))
    write_record(
        place.path / records.save_record("pending", SAVE), replace(pending([]), epoch=epoch)
    )
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
    home.run(RUN).step_path(4).mkdir()  # another node may have what this one lacks of it
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
    run = Home(tmp_path).run("0" * 16)
    run.step_path(1).mkdir(parents=True)
    (run.step_path(1) / "manifest.json").write_bytes(b"{}")
    (run.step_path(1) / ".note.json.0badf00d").symlink_to("nowhere")  # as one that is gone by now
    assert list_own_files(run, "n").steps == {1: {"manifest.json": 2}}
