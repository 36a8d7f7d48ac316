"""Simulate hosts on one machine, for tests of node failures.

A host is a set of Linux namespaces (processes, mounts, network, IPC, host name), and a tmpfs as its
memory. A cable (a veth pair) connects each host to a switch (a bridge). The switch has its own
network namespace, so the machine's network does not change.

When the process that made the hosts exits, for whatever reason, the first process of each host
exits too, and the kernel kills the host's other processes. If the owner was killed, the tmpfs
mounts remain until the next `Hosts` on this machine removes them.
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
    TOOL_TIMEOUT,
    HostsUnavailable,
    list_mounts,
    namespace_path,
    run_in_network,
    run_tool,
    start_in_namespace,
    start_namespaces,
    start_time_of,
    stop_namespaces,
)

__all__ = ["Host", "Hosts", "HostsUnavailable"]

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "mount": "mount"}
MOUNT_TAG = "shardwise-host"  # prefix of the mount source of every host's memory
NETWORK = "10.83.0"
MOST_HOSTS = 250  # addresses in the network
NAMESPACES = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net"}
LARGEST_PACKET = 1 << 16

# The script of a host's first process. Arguments: the mount source of the host's memory, the
# directory of the memory, the file of host names, and the host's name. The script unmounts the
# memory of other hosts, which would otherwise outlive them. SIGCHLD is ignored, so that the kernel
# reaps orphans.
HOST_SCRIPT = f"""
set -e
while read -r source target rest; do
  case "$source" in "$1") ;; {MOUNT_TAG}:*) umount -l "$target" ;; esac
done < /proc/mounts
mount --bind "$2" /dev/shm
mount --bind "$3" /etc/hosts
echo "$4" > /proc/sys/kernel/hostname
ip link set lo up
echo up
exec env --ignore-signal=CHLD head -n 1
"""
SWITCH_SCRIPT = (
    "set -e; ip link add switch type bridge; ip link set switch up; echo up; exec head -n 1"
)


class Host:
    """A simulated host, made by `Hosts`.

    Attributes:
        name: host name, for example `host-0`, which the other hosts can resolve.
        address: IP address on the network of the hosts.
        directory: memory and disk of the host: a tmpfs, which is deleted when the host is
            destroyed. It has the same path on the host and outside. On the host, it is also
            `/dev/shm`.
    """

    def __init__(
        self, index: int, directory: Path, memory: int, hosts_file: Path, switch_process: int
    ) -> None:
        self.name = f"host-{index}"
        self.address = _address(index)
        self.directory = directory
        self._mount_source = f"{MOUNT_TAG}:{_owner_id()}:{index}:{secrets.token_hex(4)}"
        self._port = f"port{index}"
        self._hardware_address = f"02:00:00:00:00:{index + 1:02x}"
        self._memory = memory
        self._hosts_file = hosts_file
        self._switch_process = switch_process
        self._first_process: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[str]] = []

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.address}, {self.directory})"

    @property
    def running(self) -> bool:
        """Whether the host runs."""
        return self._first_process is not None

    def start(self) -> None:
        """Start the host with empty memory, as if it were a new machine.

        Raises:
            HostsUnavailable: this machine cannot run it.
            RuntimeError: the host is already running.
        """
        if self._first_process is not None:
            raise RuntimeError(f"{self.name} is already running: call destroy() first")
        self.directory.mkdir(parents=True, exist_ok=True)
        options = f"size={self._memory},mode=1777"
        run_tool("mount", "-t", "tmpfs", "-o", options, self._mount_source, str(self.directory))
        namespace_options = (
            "--mount-proc",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
        )
        arguments = (self._mount_source, str(self.directory), str(self._hosts_file), self.name)
        try:
            self._first_process = start_namespaces(namespace_options, HOST_SCRIPT, *arguments)
            self._connect_cable(self._first_process.pid)
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

        The command gets the environment of this process, updated with `env`. The returned object
        can send signals to the process and report its exit status. The process has another id
        inside the host. Destroying the host kills the process.

        Raises:
            RuntimeError: the host is not running.
        """
        first_process = self._require_running()
        namespace_options = [
            f"--{option}={namespace_path(first_process, kind)}"
            for option, kind in NAMESPACES.items()
        ]
        arguments = [os.fspath(word) for word in command]
        process = start_in_namespace(
            namespace_path(first_process, "pid_for_children"),
            ["nsenter", *namespace_options, f"--wdns={Path.cwd()}", "--", *arguments],
            env={**os.environ, **(env or {})},
            stdout=stdout,
            stderr=stderr,
        )
        self._processes.append(process)
        return process

    def destroy(self, *, silent: bool = False) -> None:
        """Kill all processes of the host, disconnect it and delete its memory. Idempotent.

        By default, the connections to the other hosts are reset, as if the processes crashed. If
        `silent`, the host is disconnected first. The other hosts then receive nothing, as if the
        power of the host failed.
        """
        if silent:
            self._remove_cable()
        try:
            if self._first_process is not None:
                stop_namespaces(self._first_process, self._processes)
        finally:
            self._first_process = None
            self._processes.clear()
            self._remove_cable()
            while any(source == self._mount_source for source, _ in list_mounts(MOUNT_TAG)):
                run_tool("umount", "-l", str(self.directory))

    def disconnect(self) -> None:
        """Drop all packets. Open connections break only when they time out."""
        self._require_running()
        run_in_network(self._switch_process, "ip", f"link set {self._port} down")

    def connect(self) -> None:
        """Let packets pass again, after `disconnect`."""
        self._require_running()
        run_in_network(self._switch_process, "ip", f"link set {self._port} up")

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
            raise ValueError(
                f"{self.name}: rate={rate}, delay={delay}: the rate must be at least 1 byte per "
                "second, and the delay must not be negative"
            )
        if shutil.which("tc") is None:
            raise HostsUnavailable("tc is not installed: install the package iproute2")
        first_process = self._require_running()
        cable_ends = ((self._switch_process, self._port), (first_process, "eth0"))
        if rate is None and not delay:
            for process, device in cable_ends:
                run_in_network(process, "tc", f"qdisc del dev {device} root", may_fail=True)
            return
        if delay:
            rate_option = "" if rate is None else f" rate {rate}bps"
            discipline = f"netem delay {delay * 1000:.3f}ms{rate_option}"
        else:
            burst = max((rate or 0) // 100, 2 * LARGEST_PACKET)
            discipline = f"tbf rate {rate}bps burst {burst} latency 100ms"
        for process, device in cable_ends:
            run_in_network(process, "tc", f"qdisc replace dev {device} root {discipline}")

    def pause(self) -> None:
        """Stop all processes of the host (SIGSTOP), as if the machine hung."""
        self._signal("STOP")

    def resume(self) -> None:
        """Continue all processes of the host."""
        self._signal("CONT")

    def _require_running(self) -> int:
        """Return the id of the host's first process, which keeps the namespaces."""
        if self._first_process is None:
            raise RuntimeError(f"{self.name} is destroyed: call start() first")
        return self._first_process.pid

    def _connect_cable(self, first_process: int) -> None:
        run_in_network(
            self._switch_process,
            "ip",
            f"link add {self._port} type veth peer name eth0 netns {first_process}",
            f"link set {self._port} master switch up",
        )
        # A restarted host has the same hardware address, because others cache it for a minute.
        run_in_network(
            first_process,
            "ip",
            f"link set eth0 address {self._hardware_address}",
            f"addr add {self.address}/24 dev eth0",
            "link set eth0 up",
        )

    def _remove_cable(self) -> None:
        if Path(namespace_path(self._switch_process, "net")).exists():
            run_in_network(self._switch_process, "ip", f"link del {self._port}", may_fail=True)

    def _signal(self, name: str) -> None:
        """Send a signal to all processes of the host at once, except the first process."""
        kill = self.run(["sh", "-c", f"kill -s {name} -- -1"], stderr=subprocess.DEVNULL)
        kill.wait(TOOL_TIMEOUT)  # an exit status of 1 means that no other process runs


class Hosts:
    """A context manager that runs `count` hosts on one network.

    Needs root, Linux and iproute2. This process is not on any of the hosts, and cannot reach them
    over the network. Run a command on one of the hosts instead.

    Args:
        count: number of hosts.
        directory: directory for the hosts' memory; each is mounted in a subdirectory named after
            the host.
        memory: size of each host's memory in bytes; pages are allocated when they are written.

    Raises:
        ValueError: `count` is out of range, or `directory` is below /dev/shm.
        HostsUnavailable: this machine cannot run the hosts. Raised on entering the `with` block.
    """

    def __init__(
        self, count: int, directory: str | os.PathLike[str], memory: int = 1 << 28
    ) -> None:
        if not 1 <= count <= MOST_HOSTS:
            raise ValueError(f"count={count}: the number of hosts must be from 1 to {MOST_HOSTS}")
        self.count = count
        self.directory = Path(directory).resolve()
        if self.directory.is_relative_to("/dev/shm"):
            raise ValueError(
                f"directory={directory}: must not be below /dev/shm, where hosts mount their "
                "memory: pass a directory on disk"
            )
        self._memory = memory
        self._hosts: list[Host] = []
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Hosts:
        if self._switch is not None:
            raise RuntimeError("the hosts are already running: leave their `with` block first")
        _check_requirements()
        _remove_leftovers()
        try:
            self._switch = start_namespaces(["--net"], SWITCH_SCRIPT)
            hosts_file = self.directory / "etc-hosts"
            hosts_file.parent.mkdir(parents=True, exist_ok=True)
            lines = [f"{_address(index)} host-{index}" for index in range(self.count)]
            hosts_file.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]), "utf-8")
            for index in range(self.count):
                memory = self.directory / f"host-{index}"
                self._hosts.append(Host(index, memory, self._memory, hosts_file, self._switch.pid))
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
        with ExitStack() as cleanup:  # close all, even if closing one fails
            if self._switch is not None:
                cleanup.callback(stop_namespaces, self._switch)
                self._switch = None
            for host in self._hosts:
                cleanup.callback(host.destroy)
            self._hosts = []


def _address(index: int) -> str:
    return f"{NETWORK}.{index + 1}"


def _check_requirements() -> None:
    if os.geteuid() != 0:
        raise HostsUnavailable("only root can create network namespaces and mounts: run as root")
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            raise HostsUnavailable(f"{tool} is not installed: install the package {package}")


def _owner_id() -> str:
    """Return this process's id and start time, which are unique together."""
    return f"{os.getpid()}-{start_time_of(os.getpid())}"


def _remove_leftovers() -> None:
    """Unmount the memory of hosts whose owner has exited."""
    for source, directory in list_mounts(f"{MOUNT_TAG}:"):
        process, _, start_time = source.split(":")[1].partition("-")
        if start_time_of(int(process)) != start_time:
            run_tool("umount", "-l", directory, may_fail=True)
