"""Who lives is known by a lock, and by nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.memory.home import Home, Run, new_run_id
from shardwise.memory.rank_locks import RankLock, forget_lost_ranks, is_rank_alive, lost_ranks


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run without trainers."""
    return Home(tmp_path).run(new_run_id())


def test_looking_at_a_trainer_does_not_end_it(run: Run) -> None:
    presence = RankLock(run, 3)
    assert is_rank_alive(run, 3)
    assert is_rank_alive(run, 3)
    assert not is_rank_alive(run, 4)
    assert lost_ranks(run) == []
    presence.release()
    assert not is_rank_alive(run, 3)
    assert lost_ranks(run) == []


def test_one_that_goes_without_a_word_is_lost_until_it_is_back(run: Run) -> None:
    RankLock(run, 3).release_as_lost()
    assert lost_ranks(run) == [3]
    presence = RankLock(run, 3)
    assert lost_ranks(run) == []
    presence.release()


def test_a_child_does_not_keep_its_parent_alive(run: Run) -> None:
    presence = RankLock(run, 0)
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert is_rank_alive(run, 0)
        presence.release_as_lost()
        deadline = time.monotonic() + 10.0
        while not lost_ranks(run):
            assert time.monotonic() < deadline
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


TAKE = """
import sys
from pathlib import Path
from shardwise.memory import rank_locks
from shardwise.memory.home import Run
rank_locks.LOCK_TIMEOUT = 0.1
rank_locks.RankLock(Run(Path(sys.argv[1])), 0)
"""


def test_a_rank_is_not_taken_by_another_process(run: Run) -> None:
    presence = RankLock(run, 0)
    command = [sys.executable, "-c", TAKE, str(run.path)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "another process is rank 0 of run" in refused.stderr
    presence.release()
    assert subprocess.run(command, timeout=60).returncode == 0


def test_a_process_that_gave_up_may_begin_anew(run: Run) -> None:
    lost = RankLock(run, 0)
    again = RankLock(run, 0)
    assert is_rank_alive(run, 0)
    again.release()
    assert lost_ranks(run) == []
    lost.release_as_lost()


def test_those_of_before_are_forgotten_once_others_have_come(run: Run) -> None:
    """Or their node would have every snapshot persisted, though nobody is lost."""
    RankLock(run, 3).release_as_lost()
    presence = RankLock(run, 4)
    assert lost_ranks(run) == [3]
    forget_lost_ranks(run)
    assert lost_ranks(run) == []
    assert is_rank_alive(run, 4)
    presence.release_as_lost()
    assert lost_ranks(run) == [4]


def test_of_several_in_a_process_the_last_one_counts(run: Run) -> None:
    first = RankLock(run, 0)
    second = RankLock(run, 0)
    assert first.is_replaced()
    assert not second.is_replaced()
    first.release()
    assert is_rank_alive(run, 0)
    second.release()
    assert not second.is_replaced()
    assert lost_ranks(run) == []
