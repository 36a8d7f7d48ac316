"""Agents that a process forks after its imports. A new interpreter would import them for a second.

`forking_agents` starts that process, and lets `shardwise.parts.memory.spawn` send it the command
lines of agents. A fork server of `multiprocessing` that imports this module does the same in its
workers. Programs that tests start, and tests with the fixture `spawned_agents`, run the command
themselves.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardwise.parts.memory import spawn
from shardwise.parts.memory.home import Home

ADDRESS = "SHARDWISE_TESTS_FORKED_AGENTS"
PR_SET_PDEATHSIG = 1
_run_command = spawn._start_process


@dataclass(frozen=True)
class ForkedAgent:
    """An agent, with the method of `subprocess.Popen` that its starter uses."""

    pid: int

    def poll(self) -> int | None:
        """Return None while the agent runs, and 1 when it has ended."""
        state = (
            Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        )
        return 1 if state == "Z" else None


def start_agent(home: Home, command: list[str]) -> ForkedAgent | subprocess.Popen[bytes]:
    """Start an agent as `spawn` does, by a fork if `forking_agents` is in effect."""
    address = os.environ.get(ADDRESS)
    if not address:
        return _run_command(home, command)
    spawn.open_log(home.log_path).close()  # rotates the log
    request = {
        "arguments": command[command.index("agent") :],
        "log": str(home.log_path),
        "directory": os.getcwd(),
        "environ": dict(os.environ),
    }
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(address)
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        return ForkedAgent(int(connection.recv(16)))


spawn._start_process = start_agent  # type: ignore[assignment]


@contextmanager
def forking_agents() -> Iterator[None]:
    """Fork the agents that this process and its workers start."""
    if importlib.util.find_spec("aiohttp") is None:  # `make kernel` installs no agent
        yield
        return
    with tempfile.TemporaryDirectory(prefix="shardwise-agents-") as folder:
        address = f"{folder}/socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            # The word "agent" is in the command line of forked agents too, as `end_agent` requires.
            command = [sys.executable, "-m", "tests.forked_agents", str(listener.fileno()), "agent"]
            environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
            process.kill()
            process.wait()


def serve(listener: socket.socket) -> None:
    """Fork an agent for each request. Return in the forked agents, when they have ended.

    Agents that have ended stay zombies, so that tests which kill them kill no other process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the tests
    while True:
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            request = json.load(lines)
            process = os.fork()
            if process:
                connection.sendall(str(process).encode())
                continue
        listener.close()
        return run_agent(request)


def run_agent(request: dict[str, object]) -> None:
    """Run the command line of an agent in this process, as if it were a new one."""
    from shardwise.parts.cli import main

    os.setsid()
    for path, mode, descriptors in (
        (os.devnull, os.O_RDONLY, (0,)),
        (request["log"], os.O_WRONLY | os.O_APPEND, (1, 2)),
    ):
        opened = os.open(str(path), mode)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(str(request["directory"]))
    os.environ.clear()
    os.environ.update(request["environ"])  # type: ignore[call-overload]
    random.seed()
    sys.argv = ["shardwise", *request["arguments"]]  # type: ignore[misc]
    main()


if __name__ == "__main__":
    # The imports that agents share, also those that are made when something is first used.
    from typer.testing import CliRunner

    import shardwise.parts.memory.agent.node_agent
    import shardwise.parts.memory.agent.process
    import shardwise.parts.stores.object_store  # noqa: F401
    from shardwise.parts.cli.app import app

    for name in ("obstore", "boto3", "encodings.idna", "numpy.ma", "numpy.random"):
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    CliRunner().invoke(app, ["agent", "run", "--help"])
    gc.collect()
    gc.freeze()  # otherwise the collector of each agent copies the memory of all imports
    serve(socket.socket(fileno=int(sys.argv[1])))
