"""Scalars in event files of TensorBoard, which are read back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.integrations.tensorboard import TensorBoardHook
from shardwise.testing.hook_suite import HookSuite

pytest.importorskip("tensorboard", reason="pip install '.[test]'")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter


def test_a_run(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0)}
    with SummaryWriter(str(tmp_path / "logs")) as writer:
        hooks = [partial(TensorBoardHook, writer=writer)]
        with sw.Checkpointer(tmp_path / "run", memory=None, hooks=hooks) as checkpointer:
            for step in (10, 20):
                checkpointer.save(step, state)
            checkpointer.restore(state)
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"shardwise/save/write/seconds", "shardwise/save/write/seconds_waited"} < set(tags)
    assert {"shardwise/restore/read/seconds", "shardwise/restore/GB_per_s"} < set(tags)
    total = events.Scalars("shardwise/save/seconds")
    assert [each.step for each in total] == [10, 20]
    writes = events.Scalars("shardwise/save/write/seconds")
    assert all(0 < write.value <= whole.value for write, whole in zip(writes, total, strict=True))


class TestTensorBoardHook(HookSuite):
    @pytest.fixture
    def make_hook(self, tmp_path: Path) -> partial[TensorBoardHook]:
        return partial(TensorBoardHook, writer=SummaryWriter(str(tmp_path / "logs")))


class TestWithoutWriter(HookSuite):
    @pytest.fixture
    def make_hook(self) -> type[TensorBoardHook]:
        return TensorBoardHook
