"""A rank that is lost, or gives up, is noticed by all others within seconds, though it lives on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.tools.gang import Gang

TIMEOUT = timedelta(seconds=40)
SOON = 25.0  # on a busy machine, and long before the timeout


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def timed(operation: Callable[[], object], path: str, ranks: int) -> tuple[str, float]:
    """What kind of error it ends with, and after how long; then this rank lives on until so many
    have had theirs."""
    start = time.monotonic()
    try:
        operation()
    except Exception as error:  # held while this rank lives on, as a handler would
        took = time.monotonic() - start
        noticed = Path(f"{path}-noticed")
        noticed.mkdir(exist_ok=True)
        (noticed / str(dist.get_rank())).touch()
        while len(list(noticed.iterdir())) < ranks and time.monotonic() - start < SOON:
            time.sleep(0.02)
        return type(error).__name__, took
    return "", time.monotonic() - start


def connecting_within(seconds: float) -> AbstractContextManager[object]:
    """Ranks that have met are connected in that time."""
    return patch("shardwise.parts.ranks.process_groups.CONNECT_TIMEOUT", timedelta(seconds=seconds))


def train_wrongly(path: str) -> None:
    with sw.Checkpointer(path, timeout=TIMEOUT, memory=None) as checkpointer:
        checkpointer.save(1, state())
        if dist.get_rank() == 1:
            raise KeyError("a bug in the training")
        checkpointer.save(2, state())


def fail_in_training(path: str) -> tuple[str, float]:
    return timed(lambda: train_wrongly(path), path, 3)


def test_an_error_in_training_is_noticed(gang: Gang, tmp_path: Path) -> None:
    told = gang.run(fail_in_training, str(tmp_path / "root"), world=3)
    assert [kind for kind, _ in told] == ["LostRankError", "KeyError", "LostRankError"]
    assert max(took for _, took in told) < SOON, told


def die_in_save(path: str) -> tuple[str, float]:
    checkpointer = sw.Checkpointer(path, timeout=TIMEOUT, memory=None)
    checkpointer.save(1, state())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    told = timed(lambda: checkpointer.save(2, state()), path, 3)
    with pytest.raises(sw.LostRankError, match="create a new Checkpointer") as later:
        checkpointer.save(3, state())
    assert [*later.value.failures] == [1]
    return told


def test_one_that_died_is_noticed_by_those_that_wait_for_another(
    gang: Gang, tmp_path: Path
) -> None:
    outcomes = gang.run_outcomes(die_in_save, str(tmp_path / "root"), world=4)
    assert [outcome.kind for outcome in outcomes] == ["value", "died", "value", "value"]
    told = [outcome.value for outcome in outcomes if outcome.rank != 1]
    assert {kind for kind, _ in told} == {"LostRankError"}
    assert max(took for _, took in told) < SOON, told


def die_before_making(path: str) -> tuple[str, float]:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return timed(lambda: sw.Checkpointer(path, timeout=TIMEOUT, memory=None), path, 1)


def die_while_making(path: str) -> tuple[str, float]:
    dist.barrier()
    if dist.get_rank() == 1:
        die = patch(
            "shardwise.parts.ranks.tree.connect_upwards",
            lambda *_: os.kill(os.getpid(), signal.SIGKILL),
        )
        die.start()
    with connecting_within(2.0):
        return timed(lambda: sw.Checkpointer(path, timeout=TIMEOUT, memory=None), path, 1)


@pytest.mark.parametrize("die", [die_before_making, die_while_making])
def test_one_that_dies_while_the_group_is_made_is_noticed(
    gang: Gang, tmp_path: Path, die: Callable[[str], tuple[str, float]]
) -> None:
    outcomes = gang.run_outcomes(die, str(tmp_path / "root"), world=2)
    assert [outcome.kind for outcome in outcomes] == ["value", "died"]
    kind, took = outcomes[0].value
    assert kind == "LostRankError"
    assert took < SOON


def wait_for_one_that_is_late(path: str, late: float) -> tuple[str, float]:
    with connecting_within(1.0):
        checkpointer = sw.Checkpointer(path, timeout=timedelta(seconds=3), memory=None)

    def meet() -> None:
        deadline = time.monotonic() + late
        while dist.get_rank() == 1 and time.monotonic() < deadline:
            if Path(f"{path}-noticed").exists():
                return
            time.sleep(0.02)
        checkpointer.save(1, state())

    if late < 3:
        meet()
        checkpointer.close()
        return "", 0.0
    return timed(meet, path, 1)


def test_ranks_wait_for_each_other_as_long_as_they_were_told(gang: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "root")
    assert gang.run(wait_for_one_that_is_late, path, 1.5, world=2) == [("", 0.0)] * 2
    path = str(tmp_path / "other")
    (kind, took), _ = gang.run(wait_for_one_that_is_late, path, SOON, world=2)
    assert kind == "LostRankError"
    assert 2 < took < SOON
