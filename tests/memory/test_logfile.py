"""Logs of agents stay small, whoever writes to them, and however often agents are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw

LARGEST_LOG = 1 << 20
CHATTER = """
import logging, os, signal, sys, threading, time
import shardwise as sw

def chatter():
    while not logging.getLogger().handlers:
        time.sleep(0.01)
    for number in range(2500):
        logging.info("%d %s", number, "x" * 1000)
        os.write(1, b"out\\n")
        print("err", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGTERM)
    raise RuntimeError("the last word")

threading.Thread(target=chatter).start()
sw.NodeAgent(sys.argv[1]).run(log=sys.argv[2])
"""


def test_a_log_is_bounded_and_stderr_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "agent.log"
    path.parent.mkdir()
    subprocess.run([sys.executable, "-c", CHATTER, tmp_path / "shm", path], check=True)
    sizes = {each.name: each.stat().st_size for each in path.parent.iterdir()}
    assert set(sizes) == {"agent.log", "agent.log.old"}
    assert max(sizes.values()) <= LARGEST_LOG + 1000
    said = path.read_text()
    assert " INFO 2499 " in said
    assert said.count("out\n") == said.count("err\n") > 100
    assert "RuntimeError: the last word" in said


def fail_to_start(directory: Path) -> str:
    """Start an agent that ends at once, as its certificates are absent; what is said of that."""
    absent = str(directory / "absent")
    memory = sw.Memory(dir=str(directory), tls=sw.Tls(certificate=absent, key=absent, ca=absent))
    with pytest.raises(sw.StoreError, match="cannot use these files") as caught:
        sw.Checkpointer(directory / "root", memory=memory)
    return str(caught.value)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of the agent that `fail_to_start` starts."""
    home = tmp_path / f"shardwise-{os.getuid()}"
    home.mkdir(mode=0o700)
    return home / "agent.log"


def test_agents_that_end_at_once_do_not_fill_it(tmp_path: Path, log: Path) -> None:
    for _ in range(4):
        with log.open("ab") as file:
            file.write(b"x" * LARGEST_LOG)
        fail_to_start(tmp_path)
    assert sum(each.stat().st_size for each in log.parent.glob("agent.log*")) < 3 * LARGEST_LOG


def test_the_tail_goes_on_from_the_file_before(tmp_path: Path, log: Path) -> None:
    log.with_name("agent.log.old").write_text("\n".join(map(str, range(20))))
    log.write_text("20\n21\n", encoding="utf-8")
    assert "\n19\n20\n21\n" in fail_to_start(tmp_path)
