"""Whom an owner talks to, where torch.distributed runs with one rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw


def test_one_rank_alone_talks_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("one rank needs no process group")

    for name in ("new_group", "barrier", "gather", "broadcast"):
        monkeypatch.setattr(dist, name, refuse)
    try:
        with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
            checkpointer.save(1, {"t": 1})
            assert checkpointer.restore({"t": 0}) == 1
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_ranks_without_a_process_group_are_warned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    sw.save(tmp_path / "a", {"t": 1})
    assert not caplog.messages
    monkeypatch.setenv("WORLD_SIZE", "23")
    sw.save(tmp_path / "b", {"t": 1})
    with sw.Checkpointer(tmp_path / "c", memory=None) as checkpointer:
        checkpointer.save(1, {"t": 1})
    (said,) = caplog.messages
    assert said.startswith("WORLD_SIZE is 23, but there is no process group")
    assert "init_process_group" in said
