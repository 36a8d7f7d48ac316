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
    """The info of the node's agent, which is started if none lives there.

    An agent of another version of shardwise, which may not read our records, is replaced by one of
    ours, unless a training uses it.

    Raises:
        StoreError: it does not come to life, and what it logged; or it is another than is asked
            for.
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
    """The info of the agent that lives here, if one does."""
    return read_record(home.info, AgentInfo) if home.has_agent() else None


def end_agent(home: Home, info: AgentInfo) -> None:
    """End the agent that lives here: it finishes what it is writing, for 20 seconds at most.

    Raises:
        StoreError: it cannot be ended from here, or does not end.
    """
    try:
        command = Path(f"/proc/{info.process}/cmdline").read_bytes().split(b"\0")
        if info.host != socket.gethostname() or b"agent" not in command:
            raise StoreError(
                f"process {info.process} is not the agent of {home}: it may run in another "
                f"container (of host {info.host}); end it there"
            )
        os.kill(info.process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended just now
    deadline = time.monotonic() + PATIENCE
    while home.has_agent():
        if time.monotonic() > deadline:
            raise StoreError(
                f"the agent of {home} (process {info.process}) has not ended in {PATIENCE:.0f} s; "
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
            "another directory by Memory(dir=...)"
        )
    end_agent(home, info)


def _await(home: Home, command: list[str], options: Memory) -> AgentInfo:
    """Start an agent, unless others are to, and wait until it is there."""
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
                    f"no agent lives in {home}, and Memory(start_agent=False) waited for one for "
                    f"{PATIENCE:.0f} s: start `shardwise agent run --dir {home.path.parent}`"
                )
            raise StoreError(
                f"the agent of {home} did not start in {PATIENCE:.0f} s:\n{log_tail(home.log)}"
            )
        time.sleep(POLL)
    return info


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """One rank of the node at a time.

    Raises:
        StoreError: another has the lock for longer than it takes to start an agent.
    """
    fd = home.open_lock("start.lock")
    deadline = time.monotonic() + PATIENCE + LONGER
    try:
        while not _locked(fd):
            if time.monotonic() > deadline:
                raise StoreError(
                    f"another process has been starting the agent of {home} for "
                    f"{PATIENCE + LONGER:.0f} s: end it, if it is stopped (it holds "
                    f"{home.path / 'start.lock'}), and start again"
                )
            time.sleep(POLL)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    """Whether this process has the lock now."""
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
    """In a session of its own: what ends the trainers does not end it."""
    with open_log(home.log) as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _refuse_other(home: Home, info: AgentInfo, options: Memory, address: str | None) -> None:
    """Raise if an agent that runs is another than would be started.

    Raises:
        StoreError: says in what, and how to end it.
    """
    wrong = []
    served = served_address(info)
    if address is not None and served != address:
        wrong.append(f"it serves {served}, not {address} (interface={options.interface!r})")
    if options.domain is not None and info.domain != options.domain:
        wrong.append(f"its domain is {info.domain!r}, not {options.domain!r}")
    encrypted = info.url.startswith("https:")
    if encrypted != (options.tls is not None):
        wrong.append("it speaks TLS, and tls= is not given" if encrypted else "it speaks no TLS")
    if wrong:
        raise StoreError(
            f"the agent that runs in {home} does not match the options of Memory: "
            f"{'; '.join(wrong)}. Change the options, or end the agent (kill {info.process}): the "
            "next one takes over its snapshots"
        )


LARGEST = 1 << 20


def log_to(path: Path) -> logging.Handler:
    """A handler that writes to a file, as do stdout and stderr of this process from now on."""
    return _Bounded(path)


def open_log(path: Path) -> BinaryIO:
    """The file, for a process that is about to start; set aside if it is full."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LARGEST:
            path.replace(_older(path))
    return path.open("ab")


def log_tail(path: Path) -> str:
    """The last that was said."""
    said: list[str] = []
    for each in (_older(path), path):
        with suppress(OSError):
            said += each.read_text(errors="replace").splitlines()
    return "\n".join(said[-10:]) or "(it has no log)"


class _Bounded(RotatingFileHandler):
    """Sets the file aside when it is full, and stdout and stderr follow to the new one."""

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
