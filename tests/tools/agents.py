"""The agents of nodes that are directories of one machine: found by their files, and killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

NEEDS_AGENT = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="agents need aiohttp"
)


def agents_below(directory: Path) -> list[dict[str, Any]]:
    """Return the records in `agent.json` of all homes below a directory."""
    found = []
    for path in directory.glob("**/agent.json"):
        with suppress(FileNotFoundError):  # the agent has ended meanwhile
            found.append(json.loads(path.read_bytes())["record"])
    return found


def signal_agents(directory: Path, number: int) -> list[int]:
    """Send a signal to the agents of all homes below a directory; return their process ids."""
    processes = [int(agent["process"]) for agent in agents_below(directory)]
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
    return processes


def end_agents(directory: Path) -> None:
    """Kill the agents of all homes below a directory, and wait until they have exited."""
    processes = signal_agents(directory, signal.SIGKILL)
    until(lambda: not any(is_running(process) for process in processes))


def lose(directory: Path) -> None:
    """Lose a node: kill its agent and delete its memory."""
    end_agents(directory)
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return (
            Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            != "Z"
        )
    except OSError:
        return False


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"the condition was not true within {seconds:g} s"
        time.sleep(0.002)
