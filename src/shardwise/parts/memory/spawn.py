"""Finds the agent of a node, or starts one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.local_files import open_regular
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.identity import LOOPBACK, resolve_interface, served_address
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.rank_liveness import has_trainers
from shardwise.parts.memory.records import AgentInfo, schema
from shardwise.parts.memory.times import LOCK_TIMEOUT, START_TIMEOUT

START_LOCK = "start.lock"  # one rank of the node at a time starts the agent
LARGEST_LOG = 1 << 20


def ensure_agent(home: Home, options: Memory) -> AgentInfo:
    """Return the node's agent; start one if none runs.

    A running agent of another version of shardwise is replaced, because it may not be able to read
    the records of this version. If a training uses the agent, an error is raised instead.

    Raises:
        StoreError: the agent does not start (the message includes the end of its log), or a running
            agent does not match the options.
    """
    address = None if options.interface is None else resolve_interface(options.interface)
    patience = START_TIMEOUT + LOCK_TIMEOUT  # longer than another process takes to start it
    with home.lock(START_LOCK, timeout=patience) as is_held:
        if not is_held:
            raise StoreError(
                f"another process has been starting the agent of {home} for {patience:.0f} s: "
                f"end that process if it is suspended (it holds {home.path / START_LOCK}), and try "
                "again"
            )
        info = running_agent(home)
        if info is not None and info.schema != schema():
            _end_other_version(home, info, options)
            info = None
        info = info or _start_or_wait(
            home, _make_agent_command(home, options, address or LOOPBACK), options
        )
    _refuse_other_options(home, info, options, address)
    return info


def running_agent(home: Home) -> AgentInfo | None:
    """Return the agent that runs on this node, or None.

    If the agent's record is damaged, return None as well: within a second, the agent writes the
    record again.
    """
    with suppress(StoreError):
        return read_record(home.info_path, AgentInfo) if home.has_agent() else None
    return None


def end_agent(home: Home, info: AgentInfo) -> None:
    """Stop the agent of this node. It has 20 seconds to complete the actions in progress.

    Raises:
        StoreError: the agent runs in another container, or does not stop.
    """
    try:
        command = Path(f"/proc/{info.process}/cmdline").read_bytes().split(b"\0")
        if info.host != socket.gethostname() or b"agent" not in command:
            raise StoreError(
                f"cannot stop the agent of {home}: process {info.process} is another program, so "
                f"the agent probably runs in another container, of host {info.host}; stop it there"
            )
        os.kill(info.process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError):
        pass  # the agent has just ended
    for _ in Deadline(START_TIMEOUT).attempts():
        if not home.has_agent():
            return
    raise StoreError(
        f"the agent of {home} (process {info.process}) did not end within {START_TIMEOUT:.0f} s of "
        f"SIGTERM: see its log {home.log_path}, or kill the process"
    )


def _end_other_version(home: Home, info: AgentInfo, options: Memory) -> None:
    if not options.start_agent:
        raise StoreError(
            f"the agent of {home} (process {info.process}) belongs to another version of "
            f"shardwise: stop it (kill {info.process}), and start an agent of the version that "
            "trains"
        )
    if any(map(has_trainers, home.runs())):
        raise StoreError(
            f"the agent of {home} (process {info.process}) belongs to another version of "
            "shardwise, and a training run uses it: wait until that run has ended, or choose "
            "another directory with Memory(dir=…)"
        )
    end_agent(home, info)


def _start_or_wait(home: Home, command: list[str], options: Memory) -> AgentInfo:
    """Start an agent, unless `start_agent` is False, and wait until an agent runs."""
    process: subprocess.Popen[bytes] | None = None
    for _ in Deadline(START_TIMEOUT).attempts():
        if (info := running_agent(home)) is not None:
            return info
        if not home.has_agent():
            if process is not None and process.poll() is not None:
                raise StoreError(
                    f"the agent of {home} ended at once; the end of its log {home.log_path}:\n"
                    f"{log_tail(home.log_path)}"
                )
            if process is None and options.start_agent:
                home.info_path.unlink(missing_ok=True)
                process = _start_process(home, command)
    if not options.start_agent:
        raise StoreError(
            f"no agent runs in {home}, and Memory(start_agent=False) waited for one for "
            f"{START_TIMEOUT:.0f} s: start `shardwise agent run --dir {home.path.parent}`"
        )
    raise StoreError(
        f"the agent of {home} did not start within {START_TIMEOUT:.0f} s; the end of its log "
        f"{home.log_path}:\n"
        f"{log_tail(home.log_path)}"
    )


def _make_agent_command(home: Home, options: Memory, address: str) -> list[str]:
    command = [sys.executable, "-m", "shardwise", "agent", "run", f"--dir={home.path.parent}"]
    command += [f"--interface={address}", "--until-idle", f"--log={home.log_path}"]
    if options.domain is not None:
        command.append(f"--domain={options.domain}")
    if (tls := options.tls) is not None:
        files = (("cert", tls.certificate), ("key", tls.key), ("ca", tls.ca))
        command += [f"--tls-{name}={os.path.abspath(path)}" for name, path in files]
    return command


def _start_process(home: Home, command: list[str]) -> subprocess.Popen[bytes]:
    """Start an agent in a new session, so that signals to the trainers do not reach it."""
    with open_log(home.log_path) as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _refuse_other_options(
    home: Home, info: AgentInfo, options: Memory, address: str | None
) -> None:
    """Raise if a running agent does not match the options.

    Raises:
        StoreError: the agent does not match. The message lists the differences, and says how to
            stop the agent.
    """
    differences = []
    served = served_address(info)
    if address is not None and served != address:
        differences.append(f"it serves {served}, not {address} (interface={options.interface!r})")
    if options.domain is not None and info.domain != options.domain:
        differences.append(f"its domain is {info.domain!r}, not {options.domain!r}")
    uses_tls = info.url.startswith("https:")
    if uses_tls != (options.tls is not None):
        differences.append(
            "it requires TLS, and tls= is not given" if uses_tls else "it does not use TLS"
        )
    if differences:
        raise StoreError(
            f"the running agent of {home} does not match the options of Memory: "
            f"{'; '.join(differences)}. Change the options, or stop the agent "
            f"(kill {info.process}): the next agent takes over its snapshots"
        )


def open_log(path: Path) -> BinaryIO:
    """Open the log file for a process that is about to start; rotate it if it is too large."""
    with suppress(FileNotFoundError):
        if path.lstat().st_size > LARGEST_LOG:
            path.replace(_old_log_path(path))
    return os.fdopen(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def log_tail(path: Path) -> str:
    """Return the last ten lines of a log."""
    lines: list[str] = []
    for each in (_old_log_path(path), path):
        with suppress(OSError), os.fdopen(open_regular(each), errors="replace") as log:
            lines += log.read().splitlines()
    return "\n".join(lines[-10:]) or "(the log is empty)"


class RotatingLog(RotatingFileHandler):
    """Logs to a file, and redirects stdout and stderr of this process to the file.

    If the file becomes larger than 1 MiB, it is renamed to `<name>.old`, and a new file is begun.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST_LOG, backupCount=1, encoding="utf-8")
        self.namer = lambda _: str(_old_log_path(path))
        self._redirect()

    def doRollover(self) -> None:  # noqa: N802
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        if self.stream is not None:
            for fd in (1, 2):
                os.dup2(self.stream.fileno(), fd)


def _old_log_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")
