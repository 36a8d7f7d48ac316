"""Simulate hosts on one machine, for tests of node failures.

A host is a set of Linux namespaces (processes, mounts, network, IPC, host name), and a tmpfs as its
memory. A cable (a veth pair) connects each host to a switch (a bridge). The switch has its own
network namespace, so the machine's network does not change.

When the process that made the hosts exits, for whatever reason, the first process of each host
exits too, and the kernel kills the host's other processes. If the owner was killed, the tmpfs
mounts remain until the next `Hosts` on this machine removes them.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shardwise.kernel.errors import ShardwiseError

__all__ = ["Host", "Hosts", "HostsUnavailable"]

CLONE_NEWPID = 0x20000000  # from <linux/sched.h>
TOOL_TIMEOUT = 10.0
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


class HostsUnavailable(ShardwiseError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot simulate several hosts."""


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


def namespace_path(process: int, kind: str) -> str:
    """Return the path of a process's namespace: `net`, `mnt`, `pid_for_children` and so on."""
    return f"/proc/{process}/ns/{kind}"


def run_tool(*command: str, stdin: str = "", may_fail: bool = False) -> None:
    """Run a command with `stdin` as its standard input, and wait for it.

    Raises:
        HostsUnavailable: the command timed out, or failed although `may_fail` is False.
    """
    command_line = " ".join([*command, *stdin.split()])
    try:
        result = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=TOOL_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise HostsUnavailable(f"`{command_line}` timed out after {TOOL_TIMEOUT:.0f} s") from error
    if result.returncode and not may_fail:
        message = " ".join(result.stderr.split()) or f"exit status {result.returncode}"
        raise HostsUnavailable(f"`{command_line}` failed: {message}")


def run_in_network(process: int, tool: str, *lines: str, may_fail: bool = False) -> None:
    """Run a batch of `ip` or `tc` commands in the network namespace of a process.

    Raises:
        HostsUnavailable: a command failed.
    """
    network_option = f"--net={namespace_path(process, 'net')}"
    run_tool(
        "nsenter",
        network_option,
        tool,
        "-batch",
        "-",
        stdin="\n".join(lines) + "\n",
        may_fail=may_fail,
    )


def start_namespaces(
    unshare_flags: Sequence[str], script: str, *arguments: str
) -> subprocess.Popen[str]:
    """Create namespaces, and run a shell script with these arguments in them.

    The script must print `up` when it is ready. It must exit when it reads a line, or when its
    standard input ends, as it does when this process exits.

    Raises:
        HostsUnavailable: the namespaces could not be created, or the script failed.
    """
    process = subprocess.Popen(
        ["unshare", *unshare_flags, "sh", "-c", script, "sh", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    message = ""
    if process.stdout is not None and select.select([process.stdout], [], [], TOOL_TIMEOUT)[0]:
        message = process.stdout.readline()
    if message != "up\n":
        process.kill()
        message = " ".join(process.communicate()[1].split())
        reason = message or f"the script was not ready within {TOOL_TIMEOUT:.0f} s"
        raise HostsUnavailable(f"cannot create namespaces: {reason}")
    return process


def stop_namespaces(
    first_process: subprocess.Popen[str], children: Sequence[subprocess.Popen[str]] = ()
) -> None:
    """Stop a process of `start_namespaces`, and all other processes of its pid namespace.

    Args:
        first_process: the process that `start_namespaces` returned.
        children: processes in the pid namespace that are children of the caller. The kernel lets
            `first_process` exit only after the caller has waited for them.
    """
    try:
        with suppress(BrokenPipeError):
            if first_process.stdin is not None:
                first_process.stdin.write("end\n")
                first_process.stdin.flush()
        for process in children:
            process.wait(TOOL_TIMEOUT)
        first_process.communicate(timeout=TOOL_TIMEOUT)
    except BaseException:
        first_process.kill()
        raise


def start_in_namespace(
    pid_namespace: str, command: Sequence[str], **options: Any
) -> subprocess.Popen[str]:
    """Start a command in a pid namespace, as a child of this process.

    A temporary thread calls `setns`, because the call affects every process that this thread starts
    later.
    """
    started: list[subprocess.Popen[str]] = []
    failed: list[Exception] = []

    def start() -> None:
        try:
            _enter_pid_namespace(pid_namespace)
            options.update(stdin=subprocess.DEVNULL, text=True, start_new_session=True)
            started.append(subprocess.Popen(command, **options))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return started[0]


def _enter_pid_namespace(pid_namespace: str) -> None:
    """Start all later children of this thread in a pid namespace."""
    fd = os.open(pid_namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWPID):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), pid_namespace)
    finally:
        os.close(fd)


def start_time_of(process: int) -> str:
    """Return a process's start time in ticks since boot, or "" if it has exited."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]


def list_mounts(tag: str) -> list[tuple[str, str]]:
    """Return the source and directory of each mount whose source begins with a tag."""
    lines = [
        line.split()[:2] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    ]
    return [(line[0], line[1].replace(r"\040", " ")) for line in lines if line[0].startswith(tag)]
