"""Linux namespaces, and what runs in them: what `shardwise.testing.hosts` is made of."""

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

CLONE_NEWPID = 0x20000000  # of <linux/sched.h>
SECONDS_TO_OBEY = 10.0


class HostsUnavailable(ShardwiseError):  # noqa: N818 - a state of the machine, not a fault
    """This machine cannot play several hosts, for the reason that is given."""


def namespace(process: int, kind: str) -> str:
    """Where to find a namespace of a process: `net`, `mnt`, `pid_for_children` and so on."""
    return f"/proc/{process}/ns/{kind}"


def do(*command: str, text: str = "", may_fail: bool = False) -> None:
    """Run a command of the system, with a text to read, to its end.

    Raises:
        HostsUnavailable: it failed, or did not end in time.
    """
    shown = " ".join([*command, *text.split()])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=SECONDS_TO_OBEY
        )
    except subprocess.TimeoutExpired as error:
        raise HostsUnavailable(f"`{shown}` did not end in {SECONDS_TO_OBEY:.0f} s") from error
    if done.returncode and not may_fail:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise HostsUnavailable(f"`{shown}` failed: {said}")


def in_network(process: int, tool: str, *lines: str, may_fail: bool = False) -> None:
    """Have `ip` or `tc` do something in the network namespace of a process.

    Raises:
        HostsUnavailable: it refused.
    """
    space = f"--net={namespace(process, 'net')}"
    do("nsenter", space, tool, "-batch", "-", text="\n".join(lines) + "\n", may_fail=may_fail)


def start_first(kinds: Sequence[str], script: str, *words: str) -> subprocess.Popen[str]:
    """Make namespaces, and run a shell's script with these words in them.

    The script says `up` on a line when it is, and ends when it reads a line, or the end of its
    input: so it ends with this process.

    Raises:
        HostsUnavailable: the namespaces cannot be made, or the script failed.
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
        raise HostsUnavailable(f"namespaces cannot be made: {said or 'they do not come up'}")
    return process


def end_first(first: subprocess.Popen[str], others: Sequence[subprocess.Popen[str]] = ()) -> None:
    """End what `start_first` started, and with it all that runs in its namespace of processes.

    It is gone only when all the others are, and those of them that are this process's children are
    not gone before they have been waited for.
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
    """Start a command in a namespace of processes, as a child of this process.

    Only children enter a namespace of processes, and a thread that has asked for it starts all its
    children there: so the thread that does is one that ends.
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
    """Have the children that this thread starts from now on be in a namespace of processes."""
    fd = os.open(processes, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWPID):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), processes)
    finally:
        os.close(fd)


def started_at(process: int) -> str:
    """When a process started, in ticks since the machine did; nothing if it is gone."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return ""
    return status.rpartition(")")[2].split()[19]


def mounts(tag: str) -> list[tuple[str, str]]:
    """What is mounted from sources that begin with a tag: these, and where."""
    lines = [line.split()[:2] for line in Path("/proc/mounts").read_text().splitlines()]
    return [(line[0], line[1].replace(r"\040", " ")) for line in lines if line[0].startswith(tag)]
