"""A run never starts at step 0 on top of another run, and never mixes its steps with it."""

import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from tests.memory.test_snapshots import shm

__all__ = ["shm"]


def _state(value: float) -> dict[str, Any]:
    return {"model": {"weight": torch.full((4,), value)}}


def _save_with_dcp(root: Path, step: int) -> None:
    dcp.save(_state(step), checkpoint_id=root / f"step-{step}", no_dist=True)


def _save_with_torch(root: Path, step: int) -> None:
    root.mkdir(exist_ok=True)
    torch.save(_state(step), root / f"step{step}.pt")


def _save_with_safetensors(root: Path, step: int) -> None:
    from safetensors.torch import save_file

    (root / f"checkpoint_{step}").mkdir(parents=True)
    save_file(_state(step)["model"], root / f"checkpoint_{step}" / "model.safetensors")


@pytest.mark.parametrize("save", [_save_with_dcp, _save_with_torch, _save_with_safetensors])
def test_a_run_that_switches_in_place_names_start_from(
    tmp_path: Path, save: Callable[[Path, int], None]
) -> None:
    root = tmp_path / "run"
    for step in (9, 10):
        save(root, step)
    newest = next(str(each) for each in root.iterdir() if "10" in each.name)
    with sw.Checkpointer(root, memory=None, save_at_end=False) as checkpointer:
        with pytest.raises(sw.CheckpointExistsError) as caught:
            checkpointer.restore(_state(0))
        assert f"start_from={newest!r}" in str(caught.value)
    with sw.Checkpointer(root, memory=None, start_from=newest) as checkpointer:
        state = _state(0)
        checkpointer.restore(state)
        assert state["model"]["weight"].tolist() == [10.0] * 4
        checkpointer.save(11, state)
        assert checkpointer.steps() == [11]


def test_other_files_and_directories_do_not_stop_a_run(tmp_path: Path) -> None:
    (tmp_path / "logs_2026").mkdir()
    (tmp_path / "logs_2026" / "events.out").write_text("…", encoding="utf-8")
    (tmp_path / "config_1.yaml").write_text("a: 1")
    torch.save([1], tmp_path / "vocabulary.pt")
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore(_state(0)) is None


def _fill(root: Path, *steps: int) -> None:
    with sw.Checkpointer(root, memory=None) as checkpointer:
        for step in steps:
            checkpointer.save(step, _state(step))


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_forgotten_restore_is_refused_at_the_first_save(
    tmp_path: Path, shm: Path, background: bool, on_failure: Any
) -> None:
    _fill(tmp_path, 5, 10, 15)
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1) if background else None
    with sw.Checkpointer(
        tmp_path, memory=memory, on_failure=on_failure, save_every=4, save_at_end=False
    ) as checkpointer:
        for step in (1, 4):
            with pytest.raises(sw.CheckpointExistsError) as caught:
                checkpointer.save(step, _state(-1))
            for word in ("steps 5 … 15", "restore", "new root", "start_from", "overwrite=True"):
                assert word in str(caught.value)
        assert checkpointer.steps() == [5, 10, 15]


def test_a_restore_or_an_explicit_overwrite_goes_on(tmp_path: Path) -> None:
    _fill(tmp_path, 5, 10)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore(_state(0)) == 10
        checkpointer.save(15, _state(15))
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        checkpointer.save(10, _state(-10), overwrite=True)
        checkpointer.save(20, _state(20))
        assert checkpointer.steps() == [5, 10, 15, 20]


def test_a_failed_restore_does_not_let_a_run_begin_on_top(tmp_path: Path) -> None:
    _fill(tmp_path, 5, 10)
    with sw.Checkpointer(tmp_path, memory=None, save_at_end=False) as checkpointer:
        with pytest.raises(sw.MismatchError):
            checkpointer.restore({"model": {"weight": torch.zeros(5)}})
        with pytest.raises(sw.CheckpointNotFoundError):
            checkpointer.restore(_state(0), step=7)
        with pytest.raises(sw.CheckpointExistsError, match="none was restored"):
            checkpointer.save(1, _state(-1))
        assert checkpointer.steps() == [5, 10]
        assert checkpointer.restore(_state(0)) == 10
        checkpointer.save(11, _state(11))


def test_a_run_begins_again_if_all_checkpoints_are_damaged(tmp_path: Path) -> None:
    _fill(tmp_path, 5, 10)
    for path in tmp_path.glob("step-*/*.safetensors"):
        path.write_bytes(b"")
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        with pytest.raises(sw.CorruptionError):
            checkpointer.restore(_state(0))
        checkpointer.save(1, _state(-1))
    state = _state(0)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore(state, step=1) == 1
    assert state["model"]["weight"].tolist() == [-1.0] * 4


def test_a_collision_names_restore_before_overwrite(tmp_path: Path) -> None:
    _fill(tmp_path, 5)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        checkpointer.restore(_state(0))
        with pytest.raises(sw.CheckpointExistsError) as caught:
            checkpointer.save(5, _state(0))
    text = str(caught.value)
    assert text.index("restore") < text.index("overwrite=True")


@pytest.mark.parametrize(
    ("place", "spelled"),
    [
        (pathlib.Path("s3://bucket/run"), "s3://bucket/run"),
        (pathlib.Path("hdfs://host:9000/run"), "hdfs://host:9000/run"),
        ("gs:/bucket/run", "gs://bucket/run"),
        ("S3:bucket/run", "S3://bucket/run"),
        ("abfs:/container/run", "abfs://container/run"),
        (pathlib.Path("file:///data/run"), "file:///data/run"),
    ],
)
def test_a_url_that_lost_a_slash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, spelled: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(sw.StoreError) as caught:
        sw.save(place, _state(0))
    assert repr(spelled) in str(caught.value)
    for wrong in ({"root": place}, {"root": "new", "memory": sw.Memory(dir=place)}):
        with pytest.raises(sw.StoreError):
            sw.Checkpointer(**wrong)
    assert not list(tmp_path.iterdir())


def test_a_local_directory_named_like_a_scheme_needs_a_dot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sw.save("./s3:/run", _state(3))
    state = _state(0)
    sw.load("./s3:/run", state)
    assert state["model"]["weight"].tolist() == [3.0] * 4
