"""Create Linux namespaces, and start processes in them, for `shardwise.testing.hosts`."""

from __future__ import annotations

import ctypes
import os
import select
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError

CLONE_NEWPID = 0x20000000  # from <linux/sched.h>
TOOL_TIMEOUT = 10.0


class HostsUnavailable(ShardwiseError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot simulate several hosts."""


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
