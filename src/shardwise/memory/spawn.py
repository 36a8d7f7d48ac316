"""Finds the agent of a node, or starts one."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

from shardwise.errors import StoreError
from shardwise.memory.home import Home, read_record
from shardwise.memory.interface import LOOPBACK, address_of, served_address
from shardwise.memory.options import Memory
from shardwise.memory.ranks import has_trainers
from shardwise.memory.records import AgentInfo, schema

POLL = 0.02
PATIENCE = 60.0
LONGER = 10.0


def ensure_agent(home: Home, options: Memory) -> AgentInfo:
    """Return the node's agent; start one if none runs.

    An agent of another version of shardwise may not be able to read our records. It is replaced,
    unless
    a training uses it.

    Raises:
        StoreError: the agent does not start (the message includes its log), or a running one does
            not
            match the options.
    """
    address = None if options.interface is None else address_of(options.interface)
    with _alone(home):
        info = running_agent(home)
        if info is not None and info.schema != schema():
            _end_other_version(home, info, options)
            info = None
        info = info or _await(home, _command(home, options, address or LOOPBACK), options)
    _refuse_other(home, info, options, address)
    return info


def running_agent(home: Home) -> AgentInfo | None:
    """Return the agent that runs on this node, or None."""
    return read_record(home.info, AgentInfo) if home.has_agent() else None


def end_agent(home: Home, info: AgentInfo) -> None:
    """Stop the agent of this node. It completes current writes, for at most 20 seconds.

    Raises:
        StoreError: the agent runs in another container, or does not stop.
    """
    try:
        command = Path(f"/proc/{info.process}/cmdline").read_bytes().split(b"\0")
        if info.host != socket.gethostname() or b"agent" not in command:
            raise StoreError(
                f"process {info.process} is not the agent of {home}: the agent may run in another "
                f"container (of host {info.host}); stop it there"
            )
        os.kill(info.process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        pass  # the agent has just ended
    deadline = time.monotonic() + PATIENCE
    while home.has_agent():
        if time.monotonic() > deadline:
            raise StoreError(
                f"the agent of {home} (process {info.process}) did not end in {PATIENCE:.0f} s; "
                f"its log: {home.log}"
            )
        time.sleep(POLL)


def _end_other_version(home: Home, info: AgentInfo, options: Memory) -> None:
    if not options.start_agent:
        raise StoreError(
            f"the agent of {home} (process {info.process}) belongs to another version of "
            "shardwise: start one of the version that trains"
        )
    if any(has_trainers(home.run(run)) for run in home.runs()):
        raise StoreError(
            f"the agent of {home} (process {info.process}) belongs to another version of "
            "shardwise, and a training uses it: wait until that training has ended, or choose "
            "another directory with Memory(dir=…)"
        )
    end_agent(home, info)


def _await(home: Home, command: list[str], options: Memory) -> AgentInfo:
    """Start an agent if the options say so, and wait until one runs."""
    deadline = time.monotonic() + PATIENCE
    process: subprocess.Popen[bytes] | None = None
    while (info := running_agent(home)) is None:
        if not home.has_agent():
            if process is not None and process.poll() is not None:
                raise StoreError(f"the agent of {home} ended at once:\n{log_tail(home.log)}")
            if process is None and options.start_agent:
                home.info.unlink(missing_ok=True)
                process = _start(home, command)
        if time.monotonic() > deadline:
            if not options.start_agent:
                raise StoreError(
                    f"no agent runs in {home}, and Memory(start_agent=False) waited for one for "
                    f"{PATIENCE:.0f} s: start `shardwise agent run --dir {home.path.parent}`"
                )
            raise StoreError(
                f"the agent of {home} did not start within {PATIENCE:.0f} s:\n{log_tail(home.log)}"
            )
        time.sleep(POLL)
    return info


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """Hold the lock for starting an agent: one rank of the node at a time.

    Raises:
        StoreError: another process holds the lock for longer than an agent takes to start.
    """
    fd = home.open_lock("start.lock")
    deadline = time.monotonic() + PATIENCE + LONGER
    try:
        while not _locked(fd):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has been starting the agent of {home} for "
                    f"{PATIENCE + LONGER:.0f} s: end that process if it is suspended (it holds "
                    f"{home.path / 'start.lock'}), and try again"
                )
            time.sleep(POLL)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Try to take the lock; return whether this process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _command(home: Home, options: Memory, address: str) -> list[str]:
    command = [sys.executable, "-m", "shardwise", "agent", "run", f"--dir={home.path.parent}"]
    command += [f"--interface={address}", "--until-idle", f"--log={home.log}"]
    if options.domain is not None:
        command.append(f"--domain={options.domain}")
    if (tls := options.tls) is not None:
        files = (("cert", tls.certificate), ("key", tls.key), ("ca", tls.ca))
        command += [f"--tls-{name}={os.path.abspath(path)}" for name, path in files]
    return command


def _start(home: Home, command: list[str]) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own, so that signals to the trainers do not reach it."""
    with open_log(home.log) as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _refuse_other(home: Home, info: AgentInfo, options: Memory, address: str | None) -> None:
    """Raise if a running agent does not match the options.

    Raises:
        StoreError: it does not; the message lists the differences, and says how to stop it.
    """
    wrong = []
    served = served_address(info)
    if address is not None and served != address:
        wrong.append(f"it serves {served}, not {address} (interface={options.interface!r})")
    if options.domain is not None and info.domain != options.domain:
        wrong.append(f"its domain is {info.domain!r}, not {options.domain!r}")
    encrypted = info.url.startswith("https:")
    if encrypted != (options.tls is not None):
        wrong.append(
            "it requires TLS, and tls= is not given" if encrypted else "it does not use TLS"
        )
    if wrong:
        raise StoreError(
            f"the running agent of {home} does not match the options of Memory: "
            f"{'; '.join(wrong)}. Change the options, or stop the agent (kill {info.process}): the "
            "next agent takes over its snapshots"
        )


LARGEST = 1 << 20


def log_to(path: Path) -> logging.Handler:
    """Return a handler that writes to a file; redirect this process's stdout and stderr there."""
    return _Bounded(path)


def open_log(path: Path) -> BinaryIO:
    """Open the log file for a process that is about to start; rotate it first if it is full."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LARGEST:
            path.replace(_older(path))
    return path.open("ab")


def log_tail(path: Path) -> str:
    """Return the last lines of a log."""
    said: list[str] = []
    for each in (_older(path), path):
        with suppress(OSError):
            said += each.read_text(errors="replace").splitlines()
    return "\n".join(said[-10:]) or "(it has no log)"


class _Bounded(RotatingFileHandler):
    """Rotates the file when it is full, and redirects stdout and stderr to the new one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST, backupCount=1, encoding="utf-8")
        self.namer = lambda _: str(_older(path))
        self._redirect()

    def doRollover(self) -> None:  # noqa: N802
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        if self.stream is not None:
            for fd in (1, 2):
                os.dup2(self.stream.fileno(), fd)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")
