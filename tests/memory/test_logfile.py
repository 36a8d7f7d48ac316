"""Logs of agents stay small, whoever writes to them, and however often agents are started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardwise.memory.spawn import LARGEST_LOG, log_tail, open_log

CHATTER = """
import logging, os, sys
from pathlib import Path
from shardwise.memory.spawn import RotatingLog
logging.basicConfig(level=logging.INFO, handlers=[RotatingLog(Path(sys.argv[1]))])
for number in range(2500):
    logging.info("%d %s", number, "x" * 1000)
    os.write(1, b"out\\n")
    print("err", file=sys.stderr)
raise RuntimeError("the last word")
"""


def test_a_log_is_bounded_and_stderr_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    with open_log(path) as log:
        subprocess.run([sys.executable, "-c", CHATTER, path], stdout=log, stderr=log, check=False)
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert set(sizes) == {"agent.log", "agent.log.old"}
    assert max(sizes.values()) <= LARGEST_LOG + 1000
    said = path.read_text()
    assert "INFO:root:2499 " in said
    assert said.count("out\n") == said.count("err\n") > 100
    assert log_tail(path).endswith("RuntimeError: the last word")


def test_agents_that_end_at_once_do_not_fill_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    for _ in range(8):
        with open_log(path) as log:
            log.write(b"x" * (LARGEST_LOG // 2) + b"\ngone\n")
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 3 * LARGEST_LOG
    assert log_tail(path).endswith("gone")


def test_the_tail_goes_on_from_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    assert log_tail(path) == "(the log is empty)"
    (tmp_path / "agent.log.old").write_text("\n".join(map(str, range(20))))
    path.write_text("20\n21\n")
    assert log_tail(path).splitlines() == [str(each) for each in range(12, 22)]
