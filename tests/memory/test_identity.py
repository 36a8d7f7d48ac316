"""Where agents serve, and who they are: addresses, names of interfaces, secrets that last."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.memory import identity
from shardwise.memory.home import Home
from shardwise.memory.identity import (
    previous_port,
    read_or_create_node_name,
    read_or_create_secret,
    record_port,
    refuse_unreachable_agents,
    resolve_interface,
)
from shardwise.memory.records import AgentInfo


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
