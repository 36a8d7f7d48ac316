"""Hosts that tests destroy: they are apart, they die whole, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

import shardwise
from examples.hosts import MOUNT_TAG, Host, Hosts, HostsUnavailable, list_mounts

SERVE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("serving", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(socket.gethostname().encode() + bytes(int(sys.argv[2])))
"""
ASK = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 7000), timeout=1.0) as connection:
    said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
print(said.rstrip(bytes(1)).decode(), len(said), time.monotonic() - began)
"""
READ_LATER = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=1.0) as connection:
    print("connected", flush=True)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        sys.exit(1)
"""
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    while True:
        time.sleep(0.01)
        os.utime(sys.argv[1])
"""
LEAVE_AND_STAY = "setsid sleep 1000 & echo there; exec sleep 1000"
OWNER = """
import sys, time
from examples.hosts import Hosts
with Hosts(2, sys.argv[1]) as hosts:
    print(hosts[0].run(["sleep", "1000"]).pid, flush=True)
    time.sleep(1000)
"""
REDUCE = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
tensor = torch.tensor(1.0 + dist.get_rank())
dist.all_reduce(tensor)
print("sum", tensor.item(), dist.get_world_size(), flush=True)
try:
    while True:
        dist.all_reduce(tensor)
except RuntimeError:
    print("broken", flush=True)
    os._exit(3)
"""


@pytest.fixture
def hosts(on_disk: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2, on_disk / "hosts", memory=4 << 20))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        yield hosts


def python(host: Host, script: str, *args: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-S", "-c", script, *map(str, args)]
    return host.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def serve(host: Host, address: str, extra: int = 0) -> subprocess.Popen[str]:
    server = python(host, SERVE, address, extra)
    assert server.stdout is not None
    assert server.stdout.readline() == "serving\n"
    return server


def ask(host: Host, address: str) -> list[str]:
    """The name of who answers, how many bytes came, and in how many seconds; none if nobody."""
    return python(host, ASK, address).communicate(timeout=30)[0].split()


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def running(process: int) -> bool:
    try:
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


def mine(directory: Path) -> list[str]:
    """The memories that are mounted below a directory."""
    return [place for _, place in list_mounts(MOUNT_TAG) if Path(place).is_relative_to(directory)]


def children() -> set[str]:
    """The processes that this one has started and that are not gone."""
    lists = Path("/proc/self/task").glob("*/children")
    return {child for each in lists for child in each.read_text().split()}


def namespaces(processes: str) -> set[str]:
    """The namespaces of networks and processes that some processes are in."""
    found: set[str] = set()
    for link in Path("/proc").glob(f"{processes}/ns/[np][ei][td]"):
        with suppress(OSError):  # it has ended
            found.add(os.readlink(link))
    return found


def test_hosts_reach_each_other_until_the_cable_is_pulled(hosts: Hosts) -> None:
    serve(hosts[1], "0.0.0.0")
    assert ask(hosts[0], hosts[1].address)[0] == "host-1"
    assert ask(hosts[0], "host-1")[0] == "host-1"
    assert ask(hosts[0], "127.0.0.1") == []
    serve(hosts[0], "127.0.0.1")
    assert ask(hosts[0], "127.0.0.1")[0] == "host-0"
    hosts[1].disconnect()
    assert ask(hosts[0], hosts[1].address) == []
    assert ask(hosts[1], "127.0.0.1")[0] == "host-1"
    hosts[1].connect()
    assert ask(hosts[0], hosts[1].address)[0] == "host-1"
    hosts[1].destroy()
    assert ask(hosts[0], hosts[1].address) == []
    hosts[1].start()
    serve(hosts[1], "0.0.0.0")
    assert ask(hosts[0], hosts[1].address)[0] == "host-1"


@pytest.mark.parametrize("silent", [False, True])
def test_others_hear_of_the_end_of_a_host_unless_it_is_silent(hosts: Hosts, silent: bool) -> None:
    serve(hosts[1], "0.0.0.0", 64 << 20)  # more than the network holds: the server waits
    reader = python(hosts[0], READ_LATER, hosts[1].address)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "connected\n"
    hosts[1].destroy(silent=silent)
    assert reader.wait(30) == (1 if silent else 0)


def test_the_memory_of_a_host_is_its_own_and_goes_with_it(hosts: Hosts) -> None:
    one, other = hosts
    write = f"printf inside > /dev/shm/said; ls {other.directory}; readlink /proc/self/ns/pid"
    shell = one.run(["sh", "-c", write], stdout=subprocess.PIPE)
    assert shell.communicate()[0].split()[0] not in (os.readlink("/proc/self/ns/pid"), "said")
    assert (one.directory / "said").read_bytes() == b"inside"
    assert list(other.directory.iterdir()) == []
    with pytest.raises(OSError, match="No space left"):
        (one.directory / "large").write_bytes(bytes(5 << 20))
    one.destroy()
    assert list(one.directory.iterdir()) == []
    assert not one.running
    with pytest.raises(RuntimeError, match="host-0 is destroyed"):
        one.run(["true"])
    one.start()
    assert list(one.directory.iterdir()) == []
    assert one.run(["sh", "-c", "test ! -e /dev/shm/said"]).wait(30) == 0


def test_what_has_left_its_session_is_stopped_and_killed_too(hosts: Hosts) -> None:
    alive = hosts[0].directory / "alive"
    assert python(hosts[0], DAEMON, alive).wait(30) == 0
    until(lambda: alive.exists() and alive.read_text() != "")
    hosts[0].pause()
    before = alive.stat().st_mtime_ns
    time.sleep(0.05)
    assert alive.stat().st_mtime_ns == before
    hosts[0].resume()
    until(lambda: alive.stat().st_mtime_ns != before)
    # killed from within, it is reaped: a number that still answers would look alive to others
    number = alive.read_text()
    gone = f"kill -9 {number}; sleep 0.05; kill -0 {number}"
    assert hosts[0].run(["sh", "-c", gone], stderr=subprocess.DEVNULL).wait(30) != 0


def test_a_slow_cable_is_slow(hosts: Hosts) -> None:
    serve(hosts[1], "0.0.0.0", 1 << 20)
    fast = float(ask(hosts[0], hosts[1].address)[2])
    hosts[1].slow(2 << 20)
    _, nbytes, seconds = ask(hosts[0], hosts[1].address)
    assert int(nbytes) == (1 << 20) + len("host-1")
    assert float(seconds) > 0.4 > fast
    hosts[1].slow()
    assert float(ask(hosts[0], hosts[1].address)[2]) < 0.4
    with pytest.raises(ValueError, match="rate=0, delay"):
        hosts[1].slow(0)


def test_nothing_stays_of_hosts_nor_of_those_that_fail_to_start(hosts: Hosts) -> None:
    hosts.close()
    before = children()
    hosts.__enter__()
    assert len(children()) == len(before) + 3  # of each host, and of the switch
    command = ["sh", "-c", LEAVE_AND_STAY]
    sleepers = [host.run(command, stdout=subprocess.PIPE) for host in hosts]
    assert [sleeper.stdout.readline() for sleeper in sleepers if sleeper.stdout] == ["there\n"] * 2
    made = {space for sleeper in sleepers for space in namespaces(str(sleeper.pid))}
    assert len(made - namespaces("self")) == 4
    assert len(mine(hosts.directory)) == 2
    hosts.close()
    assert [sleeper.returncode for sleeper in sleepers] == [-signal.SIGKILL] * 2
    assert mine(hosts.directory) == []
    assert made.isdisjoint(namespaces("[0-9]*"))
    assert {link for _, link in socket.if_nameindex()}.isdisjoint({"port0", "port1", "switch"})
    (hosts.directory / "host-1").rmdir()
    (hosts.directory / "host-1").touch()
    with pytest.raises(FileExistsError), hosts:
        pass
    assert children() == before
    assert mine(hosts.directory) == []


def test_hosts_die_with_their_owner_and_the_next_removes_what_stays(hosts: Hosts) -> None:
    place = hosts.directory.parent / "killed"
    command = [sys.executable, "-c", OWNER, str(place)]
    environ = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True) as owner:
        assert owner.stdout is not None
        sleeper = int(owner.stdout.readline())
        owner.kill()
    until(lambda: not running(sleeper))
    assert len(mine(place)) == 2
    with Hosts(1, place):
        pass
    assert mine(place) == []
    assert len(mine(hosts.directory)) == 2


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.timeout(300)
def test_ranks_on_two_hosts_reduce_until_one_is_destroyed(hosts: Hosts, on_disk: Path) -> None:
    script = on_disk / "reduce.py"
    script.write_text(REDUCE)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400", str(script)]
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    said = [on_disk / "said-0", on_disk / "said-1"]
    for host, path in zip(hosts, said, strict=True):
        with path.open("w") as file:
            host.run(command, environ, stdout=file, stderr=subprocess.STDOUT)
    until(lambda: all("sum 3.0 2" in path.read_text() for path in said), 200)
    hosts[1].destroy()
    until(lambda: "broken" in said[0].read_text(), 30)


def test_without_root_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, on_disk: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostsUnavailable, match="only root"), Hosts(1, on_disk):
        pass
    monkeypatch.undo()
    if os.geteuid() == 0:
        monkeypatch.setenv("PATH", str(on_disk))
        with pytest.raises(HostsUnavailable, match="package iproute2"), Hosts(1, on_disk):
            pass


@pytest.mark.parametrize(("count", "directory"), [(0, "/tmp"), (251, "/tmp"), (2, "/dev/shm/x")])
def test_hosts_that_make_no_sense_are_refused(count: int, directory: str) -> None:
    with pytest.raises(ValueError, match=r"hosts"):
        Hosts(count, directory)
