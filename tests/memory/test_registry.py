"""What a root says about the nodes of its run: enough to ask them, and no secret for others."""

from __future__ import annotations

import logging
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import shardwise as sw
from shardwise.checkpointer.restoring import _describe_first_nodes
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry, data_file
from shardwise.kernel.store import LocalStore, publish_private
from shardwise.parts.memory.files import decode_record, write_record
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.identity import make_run_token, read_or_create_node_name
from shardwise.parts.memory.records import (
    PENDING,
    STATE,
    AgentInfo,
    PendingManifest,
    RankPart,
    rank_record,
)
from shardwise.parts.memory.registry import (
    MOST_EARLIER,
    MOST_NEWEST,
    NEWEST_FILE,
    NODES_DIRECTORY,
    Entries,
    NodeEntry,
    Registration,
    read_entries,
    read_newest_nodes,
    remove_earlier,
)
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.times import RETRY_PERIOD, UPKEEP_PERIOD, WEEK
from shardwise.parts.tiers.options import StorageTask
from tests.memory.test_server import RUN, TOKEN, serve
from tests.tools.agents import end_agents, until

HERE = AgentInfo("here-1", "http://127.0.0.1:7311", TOKEN, host=socket.gethostname())
THERE = AgentInfo("there/2 – ü", "http://192.0.2.7:7312", TOKEN, host="there")


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """Where the homes of nodes are, whose agents are ended afterwards."""
    yield tmp_path / "shm"
    end_agents(tmp_path / "shm")


def home_of_run(tmp_path: Path, root: Path | None = None) -> Home:
    """A home with a snapshot of a run, whose root is a directory."""
    home = Home(tmp_path / "shm")
    run = home.run(RUN)
    SnapshotDirectory(run, 1, RUN).path.mkdir(parents=True)
    run.record_info(str(LocalStore(root or tmp_path)), [])
    return home


def entries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / NODES_DIRECTORY).iterdir())


def test_what_nodes_have_written_is_read_without_their_secrets(tmp_path: Path) -> None:
    root, home = LocalStore(tmp_path), home_of_run(tmp_path)
    assert read_entries(root, RUN) == Entries([], {}, {})
    for info in (HERE, THERE):
        Registration(home, info).update()
    found = read_entries(root, RUN)
    assert {i.node: i.url for i in found.agents} == {c.node: c.url for c in (HERE, THERE)}
    assert {info.token for info in found.agents} == {make_run_token(TOKEN, RUN)}
    assert not found.unreachable
    for path in entries(tmp_path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert TOKEN.encode() not in path.read_bytes()
    assert [i.node for i in read_entries(root, RUN, [HERE.node]).agents] == [THERE.node]
    assert read_entries(root, "f" * 16).agents == [], "that is another run"


def lead_save(home: Home, step: int, infos: list[AgentInfo], epoch: int = 0) -> None:
    """Have the node lead a committed save of a step."""
    place = SnapshotDirectory(home.run(RUN), step, RUN)
    place.path.mkdir(parents=True, exist_ok=True)
    pending = PendingManifest(
        save_id=RUN,
        step=step,
        manifest="",
        files=[],
        nodes=infos,
        leader=infos[0].node,
        epoch=epoch,
        storage=StorageTask(root=""),
    )
    write_record(place.path / PENDING, pending)
    (place.path / MANIFEST).touch()


def many_infos(count: int) -> list[AgentInfo]:
    return [HERE, *(AgentInfo(f"n{i}", f"http://192.0.2.1:{i}", TOKEN) for i in range(1, count))]


def test_the_root_names_a_few_nodes_of_the_newest_snapshot(tmp_path: Path) -> None:
    root, home, now = LocalStore(tmp_path), home_of_run(tmp_path), [1e9]
    registration = Registration(home, HERE, lambda: now[0])
    registration.update()
    assert read_newest_nodes(root, RUN) == [], "nothing is committed"
    lead_save(home, 2, many_infos(2048))
    registration.update()
    found = read_newest_nodes(root, RUN)
    assert len(found) == MOST_NEWEST
    assert found[0].url == HERE.url
    assert {info.token for info in found} == {make_run_token(TOKEN, RUN)}
    path = tmp_path / NODES_DIRECTORY / NEWEST_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    assert TOKEN.encode() not in path.read_bytes()
    assert read_newest_nodes(root, "f" * 16) == [], "that is another run"
    assert [i.node for i in read_entries(root, RUN, now=1e9).agents] == [HERE.node]

    written = path.stat().st_mtime_ns
    lead_save(home, 3, many_infos(2048))
    now[0] += 2 * UPKEEP_PERIOD
    registration.update()
    assert path.stat().st_mtime_ns == written, "the nodes are the same"
    lead_save(home, 4, many_infos(2))
    now[0] += 2 * UPKEEP_PERIOD
    registration.update()
    assert [info.node for info in read_newest_nodes(root, RUN)] == [HERE.node, "n1"]

    shutil.rmtree(home.run(RUN).path)
    registration.update()
    assert entries(tmp_path) == []


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff", b"[" * 100_000, b"x" * 200_000])
def test_damaged_names_of_nodes_are_as_if_there_were_none(tmp_path: Path, damage: bytes) -> None:
    home = home_of_run(tmp_path)
    lead_save(home, 2, many_infos(2))
    Registration(home, HERE).update()
    path = tmp_path / NODES_DIRECTORY / NEWEST_FILE
    path.write_bytes(damage)
    assert read_newest_nodes(LocalStore(tmp_path), RUN) == []
    path.unlink()
    assert read_newest_nodes(LocalStore(tmp_path), RUN) == []


def test_an_entry_tells_when_its_node_last_took_part(tmp_path: Path) -> None:
    home, root = home_of_run(tmp_path), LocalStore(tmp_path)
    registration = Registration(home, HERE)
    registration.update()
    assert read_entries(root, RUN).epochs == {HERE.node: 0}
    name = data_file(0, RUN)
    place = SnapshotDirectory(home.run(RUN), 2, RUN)
    place.path.mkdir()
    registration.update()
    entry = FileEntry(name, 0, 0, 0, 0, 0, 0)
    part = RankPart(file=entry, snapshots_to_keep=2, stages=(), epoch=7)
    write_record(place.path / rank_record(0), part)
    (place.path / name).touch()
    registration.update()
    assert read_entries(root, RUN).epochs == {HERE.node: 7}


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_the_entries_of_nodes_of_long_ago_are_removed(tmp_path: Path, epoch: int) -> None:
    root = LocalStore(tmp_path)
    for number in range(2 * MOST_EARLIER):
        for of in (0, 1):
            info = replace(HERE, node=f"n{of}-{number}")
            entry = msgspec.json.encode(NodeEntry(info, RUN, 1e12 + number, of))
            publish_private(root.at(NODES_DIRECTORY), f"{info.node}.json", entry, b"")
    remove_earlier(root, RUN, epoch, excluding=["n0-0"])
    left = {info.node for info in read_entries(root, RUN).agents}
    newest = {f"n0-{number}" for number in range(MOST_EARLIER, 2 * MOST_EARLIER)} | {"n0-0"}
    of_now = {f"n1-{number}" for number in range(2 * MOST_EARLIER)}
    if epoch == 0:
        assert len(left) == 4 * MOST_EARLIER
    elif epoch == 1:
        assert left == newest | of_now
    else:
        assert left == {f"n1-{n}" for n in range(MOST_EARLIER, 2 * MOST_EARLIER)} | {"n0-0"}


def test_the_token_of_a_run_is_for_reading_that_run_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for run in (RUN, "f" * 16):
        SnapshotDirectory(home.run(run), 1, RUN).path.mkdir(parents=True)
    snapshot = SnapshotDirectory(home.run(RUN), 1, RUN).name
    with serve(home.path) as served:
        info = AgentInfo("n", f"http://127.0.0.1:{served.port}", make_run_token(TOKEN, RUN))
        client = AgentClient(info)
        assert list(client.list_files(RUN)) == [snapshot]
        refusals = (
            client.list_failing,
            lambda: client.list_files("f" * 16),
            lambda: client.call(RUN, snapshot, "persist", "n", patience=1.0, wait=0.0),
            lambda: client.call(RUN, snapshot, "rescue", "n", patience=0.0, wait=0.0),
        )
        for refused in refusals:
            with pytest.raises(StoreError, match="the agent refused this token"):
                refused()
        with pytest.raises(StoreError, match="the token of a run does not allow"):
            client.read_outcomes(RUN, 0, 0.0)
        client.close()


def test_the_token_of_a_run_reveals_no_secret(tmp_path: Path) -> None:
    """A pending manifest has the secrets of all nodes. Such a reader gets tokens of the run."""
    secrets = {"a": "the-secret-of-a", "b": "the-secret-of-b"}
    pending = PendingManifest(
        save_id="c" * 16,
        step=1,
        manifest="",
        files=[],
        nodes=[AgentInfo(node, "http://192.0.2.1:1", each) for node, each in secrets.items()],
        leader="a",
        storage=StorageTask(root=""),
    )
    place = SnapshotDirectory(Home(tmp_path).run(RUN), 1, pending.save_id).path
    place.mkdir(parents=True)
    others = ("unknown.json", "a.known", rank_record(0), STATE)
    for name in (PENDING, *others):
        write_record(place / name, pending)
    url = f"/runs/{RUN}/{place.name}"
    with serve(Home(tmp_path).path) as served:
        _, whole, _ = served.ask("GET", f"{url}/{PENDING}", token=TOKEN)
        assert decode_record(whole, PendingManifest, PENDING) == pending
        for headers in ({}, {"Range": "bytes=0-99999"}):
            status, data, _ = served.ask(
                "GET", f"{url}/{PENDING}", token=make_run_token(TOKEN, RUN), **headers
            )
            assert status == 200
            found = decode_record(data, PendingManifest, PENDING)
            assert {info.node: info.token for info in found.nodes} == {
                node: make_run_token(each, RUN) for node, each in secrets.items()
            }
            assert msgspec.structs.replace(found, nodes=pending.nodes) == pending
        (place / PENDING).write_bytes(b"damaged " + whole)
        status, data, _ = served.ask("GET", f"{url}/{PENDING}", token=make_run_token(TOKEN, RUN))
        assert (status, b"secret" in data) == (500, False)
        for name in others:
            status, data, _ = served.ask("GET", f"{url}/{name}", token=make_run_token(TOKEN, RUN))
            assert (status, b"secret" in data) == (403, False)


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o640, 0o602])
def test_entries_that_others_may_read_or_write_are_not_believed(tmp_path: Path, mode: int) -> None:
    """Whoever writes one names the address that a restore reads from."""
    Registration(home_of_run(tmp_path), HERE).update()
    (path,) = entries(tmp_path)
    path.chmod(mode)
    found = read_entries(LocalStore(tmp_path), RUN)
    assert found.agents == []
    assert "others may read or write" in found.unreachable[HERE.node]


def test_no_token_is_written_where_files_are_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stat, "S_IMODE", lambda mode: 0o777)  # as on a file system without modes
    with caplog.at_level(logging.WARNING, "shardwise"):
        Registration(home_of_run(tmp_path), HERE).update()
    assert "does not enforce file modes" in caplog.text
    (path,) = entries(tmp_path)
    assert make_run_token(TOKEN, RUN) not in path.read_text()
    assert list(read_entries(LocalStore(tmp_path), RUN).unreachable) == [HERE.node]


def test_what_is_damaged_is_told_and_what_is_old_goes(tmp_path: Path) -> None:
    root, home = LocalStore(tmp_path), home_of_run(tmp_path)
    Registration(home, HERE, lambda: 1e9).update()
    damaged = tmp_path / NODES_DIRECTORY / "damaged.json"
    damaged.touch(0o600)
    found = read_entries(root, RUN, now=1e9)
    assert [info.node for info in found.agents] == [HERE.node]
    assert "is damaged" in found.unreachable["damaged"]
    assert read_entries(root, RUN, now=1e9 + WEEK + 1).agents == []
    assert entries(tmp_path) == [damaged]


def test_a_token_is_not_sent_to_what_listens_on_another_host(tmp_path: Path) -> None:
    """An agent that serves 127.0.0.1 of its host is not the one that serves it here."""
    Registration(home_of_run(tmp_path), replace(HERE, host="elsewhere")).update()
    found = read_entries(LocalStore(tmp_path), RUN)
    assert found.agents == []
    assert "serves its own host only, elsewhere" in found.unreachable[HERE.node]


def test_a_root_that_cannot_be_written_to_is_tried_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1e9]
    (tmp_path / NODES_DIRECTORY).touch()
    registration = Registration(home_of_run(tmp_path), HERE, lambda: now[0])
    with caplog.at_level(logging.WARNING, "shardwise"):
        for _ in range(3):
            registration.update()
    assert len(caplog.records) == 1
    assert "cannot write the address of this agent" in caplog.text
    (tmp_path / NODES_DIRECTORY).unlink()
    now[0] += RETRY_PERIOD
    registration.update()
    assert len(entries(tmp_path)) == 1


def test_an_entry_goes_with_the_run(tmp_path: Path) -> None:
    home = home_of_run(tmp_path)
    registration = Registration(home, HERE)
    registration.update()
    shutil.rmtree(home.run(RUN).path)
    registration.update()
    assert entries(tmp_path) == []


def test_a_node_that_only_the_root_knows_is_asked_and_named_if_it_cannot_be(
    tmp_path: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run comes back on nodes that know nothing; the one with the newest is up, then down."""

    def opened(node: str) -> sw.Checkpointer:
        memory = sw.Memory(dir=str(shm / node), wait=5.0)
        return sw.Checkpointer(tmp_path / "root", save_every=2, memory=memory)

    def restored(node: str) -> tuple[int | None, str, list[str]]:
        checkpointer, state = opened(node), {"step": 0}
        step = checkpointer.restore(state)
        assert state["step"] == step
        report = checkpointer.last_restore
        assert report is not None
        checkpointer.close(wait=False)
        assert all(f"could not ask node {each}" in str(report) for each in report.unanswered)
        return step, report.source, list(report.unanswered)

    first = opened("first")
    for step in (2, 3):
        handle = first.save(step, {"step": step})
        assert handle is not None
        handle.result(20.0)
    first.close(wait=False)
    until(lambda: len(list((tmp_path / "root").glob("nodes/*.json"))) == 1)
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert restored("second") == (3, "memory", [])
        assert "did not say which snapshots" not in caplog.text
        end_agents(shm)
        assert restored("third") == (2, "storage", [read_or_create_node_name(Home(shm / "first"))])
        assert "did not say which snapshots" in caplog.text


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1, "n0: off"),
        (3, "n0: off; n1: off; n2: off"),
        (9, "n0: off; n1: off; n2: off; and 6 more"),
    ],
)
def test_only_the_first_unanswered_nodes_are_listed(count: int, shown: str) -> None:
    assert _describe_first_nodes({f"n{i}": "off" for i in range(count)}) == shown
