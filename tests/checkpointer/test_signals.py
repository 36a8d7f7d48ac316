"""Signals that ask a training to end; what ends the process is in tests/faults/test_jobs.py."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.tools.gang import Gang

BOTH = (signal.SIGTERM, signal.SIGUSR1)


def train(root: Path, number: int, **options: Any) -> tuple[list[int], bool]:
    """Receive a signal before step 3, on the last rank; leave the loop when preempted."""
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    with sw.Checkpointer(root, save_every=100, save_on_signals=BOTH, memory=None, **options) as cp:
        for step in range(1, 9):
            if step == 3 and last:
                os.kill(os.getpid(), number)
            assert cp.has_received_signal() == (step == 3)
            cp.save(step, {"t": step})
            if cp.preempted:
                break
    return cp.steps(), cp.preempted


def test_save_returns_and_all_ranks_know(gang: Gang, tmp_path: Path) -> None:
    for number in BOTH:
        root = tmp_path / str(int(number))
        assert gang.run(train, root, number, after_signal="return", world=2) == [([3], True)] * 2


def fake_scontrol(directory: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A program `scontrol` that notes its arguments."""
    program = directory / "scontrol"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {directory}/called\necho "no such job" >&2\nexit {code}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")


@pytest.mark.parametrize("code", [0, 1])
def test_slurm_is_asked_to_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    fake_scontrol(tmp_path, monkeypatch, code)
    caplog.set_level(logging.WARNING, "shardwise")
    assert train(tmp_path / "root", signal.SIGUSR1, after_signal="requeue") == ([3], True)
    assert (tmp_path / "called").read_text() == "requeue 4711\n"
    assert ("not requeued: scontrol requeue 4711: no such job" in caplog.text) == bool(code)


def test_a_signal_after_the_last_save_ends_nothing_where_it_is_not_to_be_delivered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = [signal.getsignal(number) for number in BOTH]
    caplog.set_level(logging.WARNING, "shardwise")
    with sw.Checkpointer(tmp_path, save_on_signals=BOTH, after_signal="return", memory=None) as cp:
        cp.save(1, {"t": 1})
        os.kill(os.getpid(), signal.SIGTERM)
    assert "SIGTERM arrived after the last save" in caplog.text
    assert [signal.getsignal(number) for number in BOTH] == before
    assert not cp.preempted


def test_the_signal_is_delivered_to_the_handler_of_before(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        assert train(tmp_path, signal.SIGUSR1)[0] == [3]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_handler_that_calls_ours_in_turn_is_not_called_again(tmp_path: Path) -> None:
    """Lightning installs such a handler after the Checkpointer is created."""
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("before"))
    try:
        with sw.Checkpointer(tmp_path, save_on_signals=[signal.SIGUSR1], memory=None) as cp:
            inner: Any = signal.getsignal(signal.SIGUSR1)

            def outer(number: int, frame: Any) -> None:
                heard.append("outer")
                inner(number, frame)

            signal.signal(signal.SIGUSR1, outer)
            os.kill(os.getpid(), signal.SIGUSR1)
            cp.save(1, {"t": 1})
            assert cp.preempted
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == ["outer", "outer", "before"]


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        ({"save_on_signals": signal.SIGTERM}, TypeError, r"\[signal\.SIGTERM\]"),
        ({"save_on_signals": [signal.SIGKILL]}, ValueError, "save_on_signals"),
        ({"save_on_signals": ["SIGTERM"]}, ValueError, "save_on_signals"),
        ({"save_on_signals": BOTH, "after_signal": "exit"}, ValueError, "'requeue'"),
        (
            {"save_on_signals": BOTH, "after_signal": "requeue"},
            ValueError,
            "SLURM_JOB_ID is not set",
        ),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    before = [signal.getsignal(number) for number in BOTH]
    with pytest.raises(error, match=said):
        sw.Checkpointer(tmp_path, memory=None, **wrong)
    assert [signal.getsignal(number) for number in BOTH] == before
