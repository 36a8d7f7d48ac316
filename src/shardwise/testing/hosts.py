"""Simulated hosts on one machine, for tests of node failures.

A host is a set of Linux namespaces (processes, mounts, network, IPC, host name) with a tmpfs as its
memory. A cable (a veth pair) connects it to a switch (a bridge). The switch has its own network
namespace, so the machine's network is not touched.

When the process that made the hosts exits, for whatever reason, the first process of each host
exits and the kernel kills the others. If the owner was killed, the tmpfs mounts remain until the
next `Hosts` on this machine removes them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shardwise.testing.namespaces import (
    SECONDS_TO_OBEY,
    HostsUnavailable,
    do,
    end_first,
    in_network,
    mounts,
    namespace,
    start_among,
    start_first,
    started_at,
)

__all__ = ["Host", "Hosts", "HostsUnavailable"]

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
TAG = "shardwise-host"  # prefix of the mount source of every host's memory
NETWORK = "10.83.0"
MOST = 250  # addresses in the network
NAMESPACES = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net"}
LARGEST_PACKET = 1 << 16

# Run by the first process of a host. Arguments: the mount source of its memory, the directory of
# its memory, the file of host names, its own name. It unmounts the memory of other hosts, which
# would otherwise outlive them. SIGCHLD is ignored, so that the kernel reaps orphans.
BOOT = f"""
set -e
while read -r source target rest; do
  case "$source" in "$1") ;; {TAG}:*) umount -l "$target" ;; esac
done < /proc/mounts
mount --bind "$2" /dev/shm
mount --bind "$3" /etc/hosts
echo "$4" > /proc/sys/kernel/hostname
ip link set lo up
echo up
exec env --ignore-signal=CHLD head -n 1
"""
SWITCH = "set -e; ip link add switch type bridge; ip link set switch up; echo up; exec head -n 1"


class Host:
    """A simulated host, made by `Hosts`.

    Attributes:
        name: host name, for example `host-0`; the other hosts can resolve it.
        address: IP address on the network of the hosts.
        directory: memory and disk of the host: a tmpfs, which is deleted when the host is
            destroyed. It has the same path inside and outside; inside it is also `/dev/shm`.
    """

    def __init__(self, index: int, directory: Path, memory: int, names: Path, switch: int) -> None:
        self.name = f"host-{index}"
        self.address = _address(index)
        self.directory = directory
        self._tag = f"{TAG}:{_owner()}:{index}:{secrets.token_hex(4)}"
        self._port = f"port{index}"
        self._hardware_address = f"02:00:00:00:00:{index + 1:02x}"
        self._memory = memory
        self._names = names
        self._switch = switch
        self._first: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[str]] = []

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address}, {self.directory})"

    @property
    def running(self) -> bool:
        """Whether the host runs."""
        return self._first is not None

    def start(self) -> None:
        """Start the host with empty memory, like a new machine with this name and address.

        Raises:
            HostsUnavailable: this machine cannot run it.
            RuntimeError: the host is already running.
        """
        if self._first is not None:
            raise RuntimeError(f"{self.name} is already running")
        self.directory.mkdir(parents=True, exist_ok=True)
        options = f"size={self._memory},mode=1777"
        do("mount", "-t", "tmpfs", "-o", options, self._tag, str(self.directory))
        spaces = ("--mount-proc", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child")
        arguments = (self._tag, str(self.directory), str(self._names), self.name)
        try:
            self._first = start_first(spaces, BOOT, *arguments)
            self._wire(self._first.pid)
        except BaseException:
            self.destroy()
            raise

    def run(
        self,
        command: Sequence[str | os.PathLike[str]],
        env: Mapping[str, str] | None = None,
        *,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on the host, in a new session and in this process's working directory.

        The command's environment is this process's, updated with `env`. The returned object takes
        signals and gives the exit status as usual; only the process id differs inside the host.
        Destroying the host kills the process.

        Raises:
            RuntimeError: the host is not running.
        """
        first = self._alive()
        spaces = [f"--{space}={namespace(first, kind)}" for space, kind in NAMESPACES.items()]
        words = [os.fspath(word) for word in command]
        process = start_among(
            namespace(first, "pid_for_children"),
            ["nsenter", *spaces, f"--wdns={Path.cwd()}", "--", *words],
            env={**os.environ, **(env or {})},
            stdout=stdout,
            stderr=stderr,
        )
        self._processes.append(process)
        return process

    def destroy(self, *, silent: bool = False) -> None:
        """Kill all processes of the host, disconnect it and delete its memory. Idempotent.

        By default the other hosts see their connections reset, as when processes crash. If
        `silent`, the host is disconnected first and they receive nothing, as when its power fails.
        """
        if silent:
            self._pull()
        try:
            if self._first is not None:
                end_first(self._first, self._processes)
        finally:
            self._first = None
            self._processes.clear()
            self._pull()
            while any(source == self._tag for source, _ in mounts(TAG)):
                do("umount", "-l", str(self.directory))

    def disconnect(self) -> None:
        """Drop all packets; open connections break only when they time out."""
        self._alive()
        in_network(self._switch, "ip", f"link set {self._port} down")

    def connect(self) -> None:
        """Let packets pass again."""
        self._alive()
        in_network(self._switch, "ip", f"link set {self._port} up")

    def slow(self, rate: int | None = None, delay: float = 0.0) -> None:
        """Slow the host's cable down; without arguments, restore full speed.

        Args:
            rate: bytes per second in each direction; unlimited if None.
            delay: latency in each direction, in seconds.

        Raises:
            ValueError: `rate` is below 1, or `delay` is negative.
            HostsUnavailable: `tc` is not installed, or the kernel lacks a module (a delay needs
                sch_netem).
        """
        if (rate is not None and rate < 1) or delay < 0:
            raise ValueError(f"{self.name} cannot be slowed to {rate} B/s and {delay} s")
        if shutil.which("tc") is None:
            raise HostsUnavailable("tc is not installed: install the package iproute2")
        first = self._alive()
        ends = ((self._switch, self._port), (first, "eth0"))
        if rate is None and not delay:
            for network, device in ends:
                in_network(network, "tc", f"qdisc del dev {device} root", may_fail=True)
            return
        if delay:
            bound = "" if rate is None else f" rate {rate}bps"
            queue = f"netem delay {delay * 1000:.3f}ms{bound}"
        else:
            burst = max((rate or 0) // 100, 2 * LARGEST_PACKET)
            queue = f"tbf rate {rate}bps burst {burst} latency 100ms"
        for network, device in ends:
            in_network(network, "tc", f"qdisc replace dev {device} root {queue}")

    def pause(self) -> None:
        """Stop all processes of the host (SIGSTOP), as when a machine hangs."""
        self._signal("STOP")

    def resume(self) -> None:
        """Continue all processes of the host."""
        self._signal("CONT")

    def _alive(self) -> int:
        """Return the id of the host's first process, which keeps the namespaces."""
        if self._first is None:
            raise RuntimeError(f"{self.name} is destroyed: start it again first")
        return self._first.pid

    def _wire(self, first: int) -> None:
        in_network(
            self._switch,
            "ip",
            f"link add {self._port} type veth peer name eth0 netns {first}",
            f"link set {self._port} master switch up",
        )
        # Keep the hardware address: the other hosts cache it for a minute.
        in_network(
            first,
            "ip",
            f"link set eth0 address {self._hardware_address}",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
        )

    def _pull(self) -> None:
        if Path(namespace(self._switch, "net")).exists():
            in_network(self._switch, "ip", f"link del {self._port}", may_fail=True)

    def _signal(self, name: str) -> None:
        """Signal all processes at once; `kill -1` spares the first one and the sender."""
        kill = self.run(["sh", "-c", f"kill -s {name} -- -1"], stderr=subprocess.DEVNULL)
        kill.wait(SECONDS_TO_OBEY)  # its status is nonzero if nothing runs


class Hosts:
    """A context manager that runs `count` hosts on one network.

    Needs root, Linux and iproute2. This process is not on any of the hosts and cannot reach them
    over the network: run a command on one of them instead.

    Args:
        count: number of hosts.
        directory: directory for the hosts' memory; each is mounted in a subdirectory named after
            the host.
        memory: size of each host's memory in bytes; pages are allocated when they are written.

    Raises:
        ValueError: `count` is out of range, or `directory` is below /dev/shm.
        HostsUnavailable: (on entering) this machine cannot run them.
    """

    def __init__(
        self, count: int, directory: str | os.PathLike[str], memory: int = 1 << 28
    ) -> None:
        if not 1 <= count <= MOST:
            raise ValueError(f"cannot make {count} hosts: the range is 1 to {MOST}")
        self.count = count
        self.directory = Path(directory).resolve()
        if self.directory.is_relative_to("/dev/shm"):
            raise ValueError(f"{directory}: must not be below /dev/shm, which hosts cannot see")
        self._memory = memory
        self._hosts: list[Host] = []
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        if self._switch is not None:
            raise RuntimeError("the hosts are already running")
        _check_the_machine()
        _remove_leftovers()
        try:
            self._switch = start_first(["--net"], SWITCH)
            names = self.directory / "etc-hosts"
            names.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{_address(index)} host-{index}" for index in range(self.count)]
            names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            for index in range(self.count):
                memory = self.directory / f"host-{index}"
                self._hosts.append(Host(index, memory, self._memory, names, self._switch.pid))
                self._hosts[-1].start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def close(self) -> None:
        """Destroy all hosts and their network."""
        with ExitStack() as each:  # close all, even if closing one fails
            if self._switch is not None:
                each.callback(end_first, self._switch)
                self._switch = None
            for host in self._hosts:
                each.callback(host.destroy)
            self._hosts = []


def _address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def _check_the_machine() -> None:
    if os.geteuid() != 0:
        raise HostsUnavailable("only root can create network namespaces and mounts")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsUnavailable(f"{tool} is not installed: install the package {package}")


def _owner() -> str:
    """Return this process's id and start time, which together are unique."""
    return f"{os.getpid()}-{started_at(os.getpid())}"


def _remove_leftovers() -> None:
    """Unmount the memory of hosts whose owner has exited."""
    for source, place in mounts(f"{TAG}:"):
        process, _, started = source.split(":")[1].partition("-")
        if started_at(int(process)) != started:
            do("umount", "-l", place, may_fail=True)
