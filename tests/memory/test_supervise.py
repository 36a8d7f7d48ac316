"""The agent of a node: who it is, how it is started, and what follows it when it ends."""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

import shardwise as sw
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import identity, spawn
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.identity import (
    previous_port,
    read_or_create_node_name,
    read_or_create_secret,
    record_port,
    refuse_unreachable_agents,
    resolve_interface,
)
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.client import AgentClient
from shardwise.parts.memory.spawn import ensure_agent, running_agent
from shardwise.parts.memory.trainer import agents
from shardwise.parts.memory.trainer.agents import AgentSupervisor
from tests.memory.certificates import Authority
from tests.tools.agents import end_agents

# Where agents serve, and who they are: addresses, names of interfaces, secrets that last.


def info(node: str, address: str, host: str) -> AgentInfo:
    """The info of an agent that serves this address."""
    return AgentInfo(node, f"http://{address}:1", "secret", 7, "", host)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("lo", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("fd00:0::2", "fd00::2"),
        ("::1", "::1"),
    ],
)
def test_addresses_and_names_of_interfaces(given: str, address: str) -> None:
    assert resolve_interface(given) == address


@pytest.mark.parametrize("given", ["0.0.0.0", "::", "fe80::1", "224.0.0.1"])
def test_what_others_cannot_use_is_refused(given: str) -> None:
    with pytest.raises(sw.StoreError, match="other nodes cannot connect to"):
        resolve_interface(given)


@pytest.mark.parametrize("given", ["nonesuch7", "localhost", "", "1.2.3", "lo\0"])
def test_what_is_no_interface_is_told(given: str) -> None:
    with pytest.raises(sw.StoreError, match=r"neither an address nor a network interface.*lo"):
        resolve_interface(given)


def test_an_interface_without_an_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity.socket, "if_nameindex", lambda: [(2, "eth8")])
    with pytest.raises(sw.StoreError, match="has no IPv4 address"):
        resolve_interface("eth8")


def test_hosts_that_cannot_reach_each_other_are_refused() -> None:
    refuse_unreachable_agents([info("a-1", "127.0.0.1", "a"), info("a-2", "127.0.0.1", "a")])
    refuse_unreachable_agents([info("a-1", "10.0.0.1", "a"), info("b-1", "10.0.0.2", "b")])
    for alone in ("127.0.0.1", "[::1]"):
        with pytest.raises(sw.StoreError, match=r"2 hosts \(a, b\).*b-1 serves") as caught:
            refuse_unreachable_agents([info("a-1", "10.0.0.1", "a"), info("b-1", alone, "b")])
        assert "Memory(interface=…)" in str(caught.value)
        assert "kill 7 on b" in str(caught.value)


def test_who_an_agent_is_lasts_as_long_as_its_home(tmp_path: Path) -> None:
    home, other = Home(tmp_path / "a"), Home(tmp_path / "b")
    assert previous_port(home) == 0
    record_port(home, 4711)
    first = (read_or_create_node_name(home), read_or_create_secret(home, None), previous_port(home))
    assert first == (read_or_create_node_name(home), read_or_create_secret(home, None), 4711)
    assert read_or_create_node_name(other) != first[0]
    assert read_or_create_secret(other, None) != first[1]
    assert len(first[1]) >= 32
    for name in ("agent.secret", "agent.port", "node"):
        assert stat.S_IMODE((home.path / name).stat().st_mode) == 0o600


def test_a_file_that_was_never_written_whole_or_is_damaged_is_made_anew(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for name in ("agent.secret", "agent.port", "node", ".agent.secret.new"):
        (home.path / name).touch()
    assert previous_port(home) == 0
    assert len(read_or_create_secret(home, None)) >= 32
    assert read_or_create_node_name(home)
    for damage in (b"\xff-1", b"a/b", b"a\nb"):
        for name in ("agent.secret", "agent.port", "node"):
            (home.path / name).write_bytes(damage)
        assert previous_port(home) == 0
        assert (
            read_or_create_node_name(home)
            == (home.path / "node").read_text()
            != damage.decode(errors="replace")
        )
        assert len(read_or_create_secret(home, None)) >= 32
    (home.path / "agent.port").write_text("70000")
    assert previous_port(home) == 0


def test_a_secret_that_is_given(tmp_path: Path) -> None:
    home, given = Home(tmp_path / "node"), tmp_path / "secret"
    given.write_text("0123456789abcdef\n")
    assert read_or_create_secret(home, given) == "0123456789abcdef"
    assert not (home.path / "agent.secret").exists()
    for wrong in ("", "short", "with a space in it", "x" * 513, "tökèn" * 5, "two-lines\n" * 3):
        given.write_text(wrong, encoding="utf-8")
        with pytest.raises(sw.StoreError, match="does not contain a secret of 16 to 512"):
            read_or_create_secret(home, given)
    with pytest.raises(sw.StoreError, match="cannot read the secret"):
        read_or_create_secret(home, tmp_path / "absent")
    assert identity.SHORTEST_SECRET == 16


# Agents of nodes as processes: started, kept alive, asked for as they are, and ended.

pytestmark = pytest.mark.usefixtures("spawned_agents")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A home whose agent is ended afterwards."""
    yield Home(tmp_path / "node")
    end_agents(tmp_path)


@contextmanager
def kept(home: Home, options: Memory) -> Iterator[AgentSupervisor]:
    """A supervisor that is stopped afterwards."""
    supervisor = AgentSupervisor(home, options)
    try:
        yield supervisor
    finally:
        supervisor.stop()


def until(seen: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def kill(info: AgentInfo) -> None:
    """As a crash would; it is gone when this returns."""
    os.kill(info.process, signal.SIGKILL)


def test_an_agent_that_dies_is_followed_by_one_that_is_the_same_to_others(
    home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    options = Memory(dir=str(home.path.parent))
    first = ensure_agent(home, options)
    with closing(AgentClient(first)) as client, kept(home, options):
        assert client.list_failing() == []
        start = time.monotonic()
        kill(first)
        until(lambda: (info := running_agent(home)) and info.process != first.process)
        assert time.monotonic() - start < 30
        second = running_agent(home)
        assert second is not None
        assert (second.node, second.url, second.token) == (first.node, first.url, first.token)
        assert client.list_failing() == []
        until(lambda: "runs again" in caplog.text)
        assert "ended; starting another" in caplog.text
    kill(second)
    until(lambda: not home.has_agent())
    time.sleep(1.5)
    assert not home.has_agent()


def test_an_agent_of_another_version_is_replaced_unless_a_training_uses_it(home: Home) -> None:
    options = Memory(dir=str(home.path.parent))
    first = ensure_agent(home, options)
    assert ensure_agent(home, options) == first
    write_record(home.info_path, msgspec.structs.replace(first, schema="older"))
    run = home.run(new_run_id())
    run.path.mkdir(parents=True)
    presence = RankLock(run, 0)
    with pytest.raises(sw.StoreError, match=r"belongs to another version.*a training run uses it"):
        ensure_agent(home, options)
    presence.release()
    presence.release_as_lost()
    with pytest.raises(sw.StoreError, match="start an agent of the version that trains"):
        ensure_agent(home, Memory(dir=str(home.path.parent), start_agent=False))
    second = ensure_agent(home, options)
    assert second.process != first.process
    assert (second.url, second.schema) == (first.url, first.schema)


def test_a_port_that_is_taken_meanwhile_is_given_up(home: Home) -> None:
    options = Memory(dir=str(home.path.parent))
    first = ensure_agent(home, options)
    kill(first)
    until(lambda: not home.has_agent())
    with socket.create_server(("127.0.0.1", urlsplit(first.url).port or 0)):
        second = ensure_agent(home, options)
    assert second.url != first.url
    assert second.token == first.token


def test_an_agent_that_is_stopped_is_told_of_and_left_alone(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "OBSERVE_PERIOD", 0.05)
    monkeypatch.setattr(agents, "ANSWER_TIMEOUT", 0.5)
    options = Memory(dir=str(home.path.parent))
    info = ensure_agent(home, options)
    with kept(home, options) as supervisor:
        os.kill(info.process, signal.SIGSTOP)
        until(lambda: "runs, but does not answer" in caplog.text)
        time.sleep(1.5)
        supervisor.check()
        assert running_agent(home) == info
        os.kill(info.process, signal.SIGCONT)
        until(lambda: "answers again" in caplog.text)
    warnings = [each for each in caplog.records if each.name == "shardwise"]
    assert len(warnings) == 2


def test_an_agent_that_cannot_live_is_given_up(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agents, "OBSERVE_PERIOD", 0.05)
    monkeypatch.setattr(agents, "MOST_STARTS", 2)
    absent = str(tmp_path / "absent")
    tls = sw.Tls(certificate=absent, key=absent, ca=absent)
    with kept(home, Memory(dir=str(home.path.parent), tls=tls)) as supervisor:
        until(lambda: supervisor._failure)
        with pytest.raises(sw.StoreError, match=r"ended 2 times within 60 s.*start an agent with"):
            supervisor.check()
        assert home.log_path.read_text().count("cannot use these files: [Errno 2]") == 2
        with home.lock("agent.lock"):
            until(lambda: not supervisor._failure)
            supervisor.check()


def test_training_can_wait_for_an_agent_that_others_start(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = home.path.parent
    with monkeypatch.context() as patch:
        patch.setattr(spawn, "START_TIMEOUT", 0.3)
        with pytest.raises(sw.StoreError, match="start `shardwise agent run --dir"):
            ensure_agent(home, Memory(dir=str(directory), start_agent=False))
    info = ensure_agent(home, Memory(dir=str(directory)))
    assert ensure_agent(home, Memory(dir=str(directory), start_agent=False)) == info


def test_an_agent_that_is_another_than_is_asked_for_is_refused(home: Home, tmp_path: Path) -> None:
    directory = str(home.path.parent)
    info = ensure_agent(home, Memory(dir=directory, domain="rack-1", interface="lo"))
    assert ensure_agent(home, Memory(dir=directory, interface="127.0.0.1")) == info
    tls = Authority(tmp_path / "authority").issue("node")
    for options, wrong in (
        (Memory(dir=directory, domain="rack-2"), "its domain is 'rack-1', not 'rack-2'"),
        (Memory(dir=directory, interface="127.0.0.2"), r"it serves 127\.0\.0\.1, not 127\.0\.0\.2"),
        (Memory(dir=directory, tls=tls), "it does not use TLS"),
    ):
        with pytest.raises(sw.StoreError, match=wrong) as caught:
            ensure_agent(home, options)
        assert f"kill {info.process}" in str(caught.value)


def test_agents_speak_tls_if_asked(home: Home, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    tls = authority.issue("node")
    info = ensure_agent(home, Memory(dir=str(home.path.parent), tls=tls))
    assert info.url.startswith("https://127.0.0.1:")
    with closing(AgentClient(info, tls=authority.issue("other").for_client())) as client:
        assert client.list_failing() == []
    with pytest.raises(sw.StoreError, match="it requires TLS, and tls= is not given"):
        ensure_agent(home, Memory(dir=str(home.path.parent)))


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6")
def test_agents_serve_ipv6(home: Home) -> None:
    info = ensure_agent(home, Memory(dir=str(home.path.parent), interface="::1"))
    assert info.url.startswith("http://[::1]:")
    with closing(AgentClient(info)) as client:
        assert client.list_failing() == []
    assert ensure_agent(home, Memory(dir=str(home.path.parent), interface="0:0::1")) == info


def test_a_home_that_disappears_is_no_harm(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agents, "OBSERVE_PERIOD", 0.05)
    with kept(home, Memory(dir=str(home.path.parent), start_agent=False)), home.lock("agent.lock"):
        home.path.rename(home.path.with_name("away"))
        until(lambda: "checking the agent" in caplog.text)
        time.sleep(0.3)
        assert caplog.text.count("checking the agent") == 1


def test_a_supervisor_that_is_deleted_stops(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "OBSERVE_PERIOD", 0.05)
    supervisor = AgentSupervisor(home, Memory(dir=str(home.path.parent), start_agent=False))
    thread = supervisor._thread
    with home.lock("agent.lock"):
        del supervisor
        until(lambda: not thread.is_alive())


def test_an_agent_that_another_process_never_finishes_starting_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process is stopped, and keeps its lock."""
    home = Home(tmp_path)
    monkeypatch.setattr(spawn, "START_TIMEOUT", 0.0)
    monkeypatch.setattr(spawn, "LOCK_TIMEOUT", 0.05)
    with (
        home.lock("start.lock"),
        pytest.raises(sw.StoreError, match="another process has been starting the agent"),
    ):
        spawn.ensure_agent(home, Memory(dir=str(tmp_path)))
