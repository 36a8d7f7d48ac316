"""What a root says about the nodes of its run: enough to ask them, and no secret for others."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

import shardwise as sw
from shardwise.errors import StoreError
from shardwise.memory.home import Home
from shardwise.memory.identity import make_run_token, read_or_create_node_name
from shardwise.memory.records import AgentInfo
from shardwise.memory.registry import (
    LONGEST_AGE,
    NODES_DIRECTORY,
    NodeRegistry,
    Registration,
    registry_of,
)
from shardwise.memory.remote.client import AgentClient
from shardwise.store import LocalStore, private
from tests.faults.memory.scenario import end_agents
from tests.memory.test_server import RUN, TOKEN, serve
from tests.tools.faulty_store import READ_ONLY, Fault, FaultyStore

HERE = AgentInfo("here-1", "http://127.0.0.1:7311", TOKEN, host=socket.gethostname())
THERE = AgentInfo("there/2 – ü", "http://192.0.2.7:7312", TOKEN, host="there")


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """Where the homes of nodes are, whose agents are ended afterwards."""
    yield tmp_path / "shm"
    end_agents(tmp_path / "shm")


def test_what_nodes_have_written_is_read_without_their_secrets(tmp_path: Path) -> None:
    registry = NodeRegistry(LocalStore(tmp_path), RUN)
    assert registry.read()[0] == []
    for info in (HERE, THERE):
        registry.write_entry(info, 0)
    found = registry.read()
    assert {info.node: info.url for info in found[0]} == {c.node: c.url for c in (HERE, THERE)}
    assert {info.token for info in found[0]} == {make_run_token(TOKEN, RUN)}
    assert not found[1]
    for path in (tmp_path / NODES_DIRECTORY).iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert TOKEN.encode() not in path.read_bytes()
    assert NodeRegistry(LocalStore(tmp_path), "f" * 16).read()[0] == [], "that is another run"
    assert [info.node for info in registry.read({HERE.node})[0]] == [THERE.node]
    registry.remove_entry(THERE.node)
    assert [info.node for info in registry.read()[0]] == [HERE.node]


def test_the_token_of_a_run_is_for_reading_that_run_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for run in (RUN, "f" * 16):
        home.run(run).step_path(1).mkdir(parents=True)
    with serve(home.path) as served:
        info = AgentInfo("n", f"http://127.0.0.1:{served.port}", make_run_token(TOKEN, RUN))
        client = AgentClient(info)
        assert list(client.list_files(RUN)) == [1]
        refusals = (
            client.list_failing,
            lambda: client.list_files("f" * 16),
            lambda: client.put(RUN, 1, "persist-0123456789abcdef.json", b"{}"),
        )
        for refused in refusals:
            with pytest.raises(StoreError, match="the agent refused this token"):
                refused()
        client.close()


@pytest.mark.parametrize("mode", [0o644, 0o620])
def test_entries_that_others_may_read_or_write_are_not_believed(tmp_path: Path, mode: int) -> None:
    """Whoever writes one names the address that a restore reads from."""
    registry = NodeRegistry(LocalStore(tmp_path), RUN)
    registry.write_entry(HERE, 0)
    (path,) = (tmp_path / NODES_DIRECTORY).iterdir()
    path.chmod(mode)
    found = registry.read()
    assert found[0] == []
    assert "others may read or write" in found[1][HERE.node]


def test_no_token_is_written_where_files_are_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private, "is_private", lambda found: False)
    registry = NodeRegistry(LocalStore(tmp_path), RUN)
    with caplog.at_level(logging.WARNING, "shardwise"):
        registry.write_entry(HERE, 0)
    assert "does not enforce file modes" in caplog.text
    (path,) = (tmp_path / NODES_DIRECTORY).iterdir()
    assert make_run_token(TOKEN, RUN) not in path.read_text()
    assert list(registry.read()[1]) == [HERE.node]


def test_what_is_damaged_old_or_of_another_run_is_told_or_goes(tmp_path: Path) -> None:
    now = [1e9]
    registry = NodeRegistry(LocalStore(tmp_path), RUN, lambda: now[0])
    registry.write_entry(HERE, 0)
    NodeRegistry(LocalStore(tmp_path), "f" * 16).write_entry(THERE, 0)
    damaged = tmp_path / NODES_DIRECTORY / "damaged.json"
    damaged.touch(0o600)
    assert "is damaged" in registry.read()[1]["damaged"]
    registry.remove_old_entries()
    assert {path.name for path in (tmp_path / NODES_DIRECTORY).iterdir()} == {
        "here-1.json",
        damaged.name,
    }
    now[0] += LONGEST_AGE + 1
    assert registry.read()[0] == []
    registry.remove_old_entries()
    assert [path.name for path in (tmp_path / NODES_DIRECTORY).iterdir()] == [damaged.name]


def test_a_token_is_not_sent_to_what_listens_on_another_host(tmp_path: Path) -> None:
    """An agent that serves 127.0.0.1 of its host is not the one that serves it here."""
    registry = NodeRegistry(LocalStore(tmp_path), RUN)
    registry.write_entry(replace(HERE, host="elsewhere"), 0)
    found = registry.read()
    assert found[0] == []
    assert "serves its own host only, elsewhere" in found[1][HERE.node]


def test_a_root_that_cannot_be_written_to_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NODES_DIRECTORY).touch()
    registration = Registration(NodeRegistry(LocalStore(tmp_path), RUN))
    with caplog.at_level(logging.WARNING, "shardwise"):
        for epoch in (0, 1):
            registration.update(HERE, epoch, removes_old_entries=True)
    assert len(caplog.records) == 1
    assert "cannot write the address of this node" in caplog.text


def test_an_entry_is_written_in_the_background_and_again_after_a_failure(tmp_path: Path) -> None:
    fault = Fault(0, READ_ONLY, verbs=("publish",))
    root = FaultyStore(LocalStore(tmp_path), fault)
    # A wrapped store is not local, so that its entries are published and read like other files.
    registration = Registration(NodeRegistry(root, RUN), waits=False)
    for expected in (1, 2, 2):
        registration.update(HERE, 0, removes_old_entries=True)
        registration.finish()
        assert len(fault.operations) == expected
    assert NodeRegistry(root, RUN).read()[0] != []
    registration.remove(HERE.node)
    assert NodeRegistry(root, RUN).read()[0] == []


def test_an_agent_that_comes_back_elsewhere_says_so(tmp_path: Path) -> None:
    run = Home(tmp_path / "shm").run(RUN)
    registry = NodeRegistry(LocalStore(tmp_path / "root"), RUN)
    moved = replace(HERE, url="http://127.0.0.1:7399")
    assert registry_of(run) is None
    run.path.mkdir()
    run.set_root(str(LocalStore(tmp_path / "root")))
    found = registry_of(run)
    assert found is not None
    found.update_address(moved)
    assert registry.read()[0] == [], "it never saved"
    registry.write_entry(HERE, 0)
    found.update_address(moved)
    assert [info.url for info in registry.read()[0]] == [moved.url]
    found.remove_entry(HERE.node)
    assert registry.read()[0] == []


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
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert restored("second") == (3, "memory", [])
        assert "did not say which snapshots" not in caplog.text
        end_agents(shm)
        assert restored("third") == (2, "storage", [read_or_create_node_name(Home(shm / "first"))])
        assert "did not say which snapshots" in caplog.text
