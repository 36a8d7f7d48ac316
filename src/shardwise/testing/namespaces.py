"""Linux namespaces and the processes in them, for `shardwise.testing.hosts`."""

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
SECONDS_TO_OBEY = 10.0


class HostsUnavailable(ShardwiseError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot simulate several hosts."""


def namespace(process: int, kind: str) -> str:
    """Return the path of a process's namespace: `net`, `mnt`, `pid_for_children` and so on."""
    return f"/proc/{process}/ns/{kind}"


def do(*command: str, text: str = "", may_fail: bool = False) -> None:
    """Run a command with `text` as its input, and wait for it.

    Raises:
        HostsUnavailable: the command failed or timed out.
    """
    shown = " ".join([*command, *text.split()])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS_TO_OBEY
        )
    except subprocess.TimeoutExpired as error:
        raise HostsUnavailable(f"`{shown}` timed out after {SECONDS_TO_OBEY:.0f} s") from error
    if done.returncode and not may_fail:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise HostsUnavailable(f"`{shown}` failed: {said}")


def in_network(process: int, tool: str, *lines: str, may_fail: bool = False) -> None:
    """Run a batch of `ip` or `tc` commands in the network namespace of a process.

    Raises:
        HostsUnavailable: a command failed.
    """
    space = f"--net={namespace(process, 'net')}"
    do("nsenter", space, tool, "-batch", "-", text="\n".join(lines) + "\n", may_fail=may_fail)


def start_first(kinds: Sequence[str], script: str, *words: str) -> subprocess.Popen[str]:
    """Create namespaces and run a shell script with these arguments in them.

    The script prints `up` when it is ready, and exits when it reads a line or its input ends. So it
    exits with this process.

    Raises:
        HostsUnavailable: the namespaces could not be created, or the script failed.
    """
    process = subprocess.Popen(
        ["unshare", *kinds, "sh", "-c", script, "sh", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said = ""
    if process.stdout is not None and select.select([process.stdout], [], [], SECONDS_TO_OBEY)[0]:
        said = process.stdout.readline()
    if said != "up\n":
        process.kill()
        said = " ".join(process.communicate()[1].split())
        raise HostsUnavailable(f"cannot create namespaces: {said or 'the script did not start'}")
    return process


def end_first(first: subprocess.Popen[str], others: Sequence[subprocess.Popen[str]] = ()) -> None:
    """Stop a process of `start_first`, and with it all processes of its pid namespace.

    It exits only after all the others. `others` are children of this process in that namespace,
    which must be waited for first.
    """
    try:
        with suppress(BrokenPipeError):
            if first.stdin is not None:
                first.stdin.write("end\n")
                first.stdin.flush()
        for process in others:
            process.wait(SECONDS_TO_OBEY)
        first.communicate(timeout=SECONDS_TO_OBEY)
    except BaseException:
        first.kill()
        raise


def start_among(processes: str, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a command in a pid namespace, as a child of this process.

    `setns` affects all later children of the calling thread, so a short-lived thread calls it.
    """
    started: list[subprocess.Popen[str]] = []
    failed: list[Exception] = []

    def start() -> None:
        try:
            _enter_processes(processes)
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


def _enter_processes(processes: str) -> None:
    """Put all later children of this thread into a pid namespace."""
    fd = os.open(processes, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWPID):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), processes)
    finally:
        os.close(fd)


def started_at(process: int) -> str:
    """Return a process's start time in ticks since boot, or "" if it has exited."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]


def mounts(tag: str) -> list[tuple[str, str]]:
    """Return the source and directory of each mount whose source begins with a tag."""
    lines = [line.split()[:2] for line in Path("/proc/mounts").read_text().splitlines()]
    return [(line[0], line[1].replace(r"\040", " ")) for line in lines if line[0].startswith(tag)]
