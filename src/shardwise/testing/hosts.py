"""Hosts on one machine, for tests of what happens when nodes fail.

A host is a set of Linux namespaces: of processes, mounts, network, host name. A cable (a veth pair)
joins it to a switch (a bridge, in a network namespace of its own), so that the network of the
machine is left alone, and its memory is a tmpfs. The first process of a host ends when its owner
does, however it ends, and the kernel then kills all others there; of an owner that was killed,
only the memory's mounts are left, and the next `Hosts` on this machine removes those.
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
TAG = "shardwise-host"  # what the memory of every host is mounted from begins with this
NETWORK = "10.83.0"
MOST = 250  # addresses of the network
NAMESPACES = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net"}
LARGEST_PACKET = 1 << 16

# Run by the first process of a host: the tag of its memory, where that is, host names, own name.
# A memory that another host's mounts still refer to would outlive its host: so those are dropped.
# With SIGCHLD ignored, the kernel reaps the orphans that the first process inherits.
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
    """One of the hosts; use those that `Hosts` makes.

    Attributes:
        name: what it is called, by itself and by the others: `host-0`.
        address: its address on the network of the hosts.
        directory: its memory and its disk: a tmpfs that is gone when it is destroyed. It is seen
            under this path from within and from without, and within as `/dev/shm` as well.
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
        """Whether it has been started, and not been destroyed since."""
        return self._first is not None

    def start(self) -> None:
        """Start it, as a new machine of this name and address: its memory is empty.

        Raises:
            HostsUnavailable: this machine refuses it.
            RuntimeError: it runs already.
        """
        if self._first is not None:
            raise RuntimeError(f"{self.name} runs already")
        self.directory.mkdir(parents=True, exist_ok=True)
        options = f"size={self._memory},mode=1777"
        do("mount", "-t", "tmpfs", "-o", options, self._tag, str(self.directory))
        spaces = ("--mount-proc", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child")
        told = (self._tag, str(self.directory), str(self._names), self.name)
        try:
            self._first = start_first(spaces, BOOT, *told)
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
        """Start a command on the host, in a session of its own and in this process's directory.

        `env` is added to this process's environment. The process that is returned is that of the
        command: its signals, its exit status; its number on the host is another. It ends with the
        host, if not before.

        Raises:
            RuntimeError: the host is destroyed.
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
        """Kill all that runs there, pull its cable, and drop its memory; nothing if done before.

        The others see their connections to it reset, as when its processes crash. If `silent`,
        the cable comes first, so that they hear nothing any more, as when its power fails.
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
        """Let no packet through any more; connections break when somebody loses patience."""
        self._alive()
        in_network(self._switch, "ip", f"link set {self._port} down")

    def connect(self) -> None:
        """Let packets through again."""
        self._alive()
        in_network(self._switch, "ip", f"link set {self._port} up")

    def slow(self, rate: int | None = None, delay: float = 0.0) -> None:
        """Slow its cable down, both ways; without arguments it is as fast as ever again.

        Args:
            rate: bytes a second, each way; no bound if None.
            delay: seconds that a packet is under way, each way.

        Raises:
            ValueError: they are no rate and no delay.
            HostsUnavailable: there is no tc, or the kernel has not what it takes (for a delay, the
                module sch_netem).
        """
        if (rate is not None and rate < 1) or delay < 0:
            raise ValueError(f"{self.name} cannot be slowed to {rate} B/s and {delay} s")
        if shutil.which("tc") is None:
            raise HostsUnavailable("tc is not installed: it is of the package iproute2")
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
        """Stop all processes where they are (SIGSTOP), as when the machine hangs."""
        self._signal("STOP")

    def resume(self) -> None:
        """Let all processes go on."""
        self._signal("CONT")

    def _alive(self) -> int:
        """The number of the process that all namespaces hang on."""
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
        # The same as ever: others would send to that of the host that was destroyed, for a minute.
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
        """Signal all at once: of those in a namespace, -1 leaves out the first and the sender."""
        kill = self.run(["sh", "-c", f"kill -s {name} -- -1"], stderr=subprocess.DEVNULL)
        kill.wait(SECONDS_TO_OBEY)  # it fails where nothing runs


class Hosts:
    """`count` hosts on one network, for as long as the block runs.

    Args:
        count: how many.
        directory: where their memories are mounted, in directories that are called as they are.
        memory: bytes that each of them has; they take room only where they are written.

    Needs root, Linux, and iproute2. This process is on none of the hosts and reaches none of them
    over the network: what is to talk to them runs on one of them.

    Raises:
        ValueError: there cannot be so many, or not there.
        HostsUnavailable: (on entering) this machine cannot do it, and why.
    """

    def __init__(
        self, count: int, directory: str | os.PathLike[str], memory: int = 1 << 28
    ) -> None:
        if not 1 <= count <= MOST:
            raise ValueError(f"from 1 to {MOST} hosts can be made, not {count}")
        self.count = count
        self.directory = Path(directory).resolve()
        if self.directory.is_relative_to("/dev/shm"):
            raise ValueError(f"{directory}: hosts have a /dev/shm of their own, which hides that")
        self._memory = memory
        self._hosts: list[Host] = []
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        if self._switch is not None:
            raise RuntimeError("these hosts run already")
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
        """Destroy all of them, and what joined them."""
        with ExitStack() as each:  # one that fails does not keep the others
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
        raise HostsUnavailable("only root may make network namespaces and mounts")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsUnavailable(f"{tool} is not installed: it is of the package {package}")


def _owner() -> str:
    """The number of this process and when it started: no other ever has both."""
    return f"{os.getpid()}-{started_at(os.getpid())}"


def _remove_leftovers() -> None:
    """Unmount the memories of hosts whose owner is gone."""
    for source, place in mounts(f"{TAG}:"):
        process, _, started = source.split(":")[1].partition("-")
        if started_at(int(process)) != started:
            do("umount", "-l", place, may_fail=True)
