"""What users pass by mistake, and roots that are unusual."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import shardwise as sw
from shardwise.integrations.dcp import StorageWriter
from tests.memory.test_snapshots import shm
from tests.tools.gang import Gang

__all__ = ["shm"]


def checkpointer(**options: Any) -> Callable[[Path], object]:
    return lambda path: sw.Checkpointer(path / "run", **{"memory": None, **options})


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (checkpointer(keep=3), TypeError, r"sw\.Keep\(last=3\)"),
        (checkpointer(memory=True), TypeError, r"sw\.Memory"),
        (checkpointer(start_from=3), TypeError, "start_from=3"),
        (checkpointer(save_every=2.0), TypeError, "save_every=2.0"),
        (checkpointer(save_every=True), TypeError, "expected an integer"),
        (checkpointer(on_failure="ignore"), ValueError, "'raise' or 'warn'"),
        (lambda path: sw.Memory(slots=1.0), TypeError, "expected an integer"),  # type: ignore
        (lambda path: sw.Memory(slots=1, copies=1), ValueError, "need slots=2"),
        (lambda path: sw.Memory(slots=1, parity=1), ValueError, "need slots=2"),
        (lambda path: sw.load("org/Model-7B", {}), sw.CheckpointNotFoundError, "Hugging Face Hub"),
        (lambda path: sw.open("org/Model-7B"), sw.CheckpointNotFoundError, "snapshot_download"),
        (
            lambda path: sw.open("c/Model-7B"),
            sw.CheckpointNotFoundError,
            "is no checkpoint; check the path$",
        ),
        (
            lambda path: sw.open(path / "c" / "manifest.json"),
            sw.CheckpointNotFoundError,
            "its directory",
        ),
        (lambda path: sw.save(path / "file", {"t": 1}), sw.StateError, "is a file"),
        (lambda path: sw.Checkpointer(path / "file", memory=None), sw.StateError, "is a file"),
        (lambda path: sw.Checkpointer(path / "file"), sw.StateError, "is a file"),
        (lambda path: sw.Checkpointer(os.fsdecode(b"/tmp/\xff")), sw.StoreError, "UTF-8"),
        (lambda path: sw.save(os.fsdecode(b"/tmp/\xff"), {"t": 1}), sw.StoreError, "UTF-8"),
    ],
)
def test_the_call_says_what_is_expected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Path], object],
    error: type[Exception],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    sw.save(tmp_path / "c", {"t": 1})
    with pytest.raises(error, match=said):
        call(tmp_path)


def test_a_step_that_is_not_there_leads_to_the_steps_that_are(tmp_path: Path) -> None:
    state = {"t": torch.arange(5)}
    with sw.Checkpointer(tmp_path, memory=None) as cp:
        handles = [cp.save(step, state) for step in (3, 4)]
        assert str(handles) == "[<SaveHandle of step 3>, <SaveHandle of step 4>]"
        advice = r"step 9 \(newest steps: 3, 4\): pass one of these steps, or step='newest'$"
        with pytest.raises(sw.CheckpointNotFoundError, match=advice):
            cp.restore(state, step=9)


@pytest.mark.parametrize(("in_memory", "overwrite"), [(False, False), (False, True), (True, False)])
def test_a_file_in_the_place_of_a_step_is_named(
    tmp_path: Path, in_memory: bool, overwrite: bool
) -> None:
    """The error says what is there, and what to do. Other steps are saved as ever."""
    said = r"a file is where.*move or remove it.*step-00000005"
    memory = sw.Memory(dir=tmp_path / "node") if in_memory else None
    (tmp_path / "step-00000005").write_text("notes")
    with sw.Checkpointer(tmp_path, memory=memory) as cp:
        with pytest.raises(sw.StoreError, match=said):
            cp.save(5, {"t": 1}, overwrite=overwrite)
        cp.save(6, {"t": 1})
    with pytest.raises(NotADirectoryError, match=said):
        sw.remove(tmp_path / "step-00000005")
    assert [each.step for each in sw.list_checkpoints(tmp_path).checkpoints] == [6]
    assert (tmp_path / "step-00000005").read_text() == "notes"


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("restores", [False, True])
def test_a_step_that_this_run_has_saved_is_said_to_be(
    tmp_path: Path, in_memory: bool, restores: bool
) -> None:
    """The error does not ask for a restore, which has taken place or would not help."""
    memory = sw.Memory(dir=tmp_path / "node") if in_memory else None
    said = r"step 6 is already saved in this run: save each step once, or pass overwrite=True"
    with sw.Checkpointer(tmp_path / "run", memory=memory) as cp:
        if restores:
            cp.restore({"t": 0})
        for step in (5, 6):
            handle = cp.save(step, {"t": 1})
            assert handle is not None
            handle.result(120.0)
        if restores:
            assert cp.restore({"t": 0}) == 6
        with pytest.raises(sw.CheckpointExistsError, match=said):
            cp.save(6, {"t": 2})
        cp.save(7, {"t": 3})


def test_a_save_of_no_run_says_how_to_continue_one(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"t": 1}, step=5)
    with pytest.raises(sw.CheckpointExistsError, match="to continue its run, call restore before"):
        sw.save(tmp_path / "c", {"t": 1}, step=5)


def test_no_save_goes_directly_into_the_root_of_a_run(tmp_path: Path) -> None:
    """Such a save would hide the checkpoints of the run. Earlier versions accepted it."""
    root, state = tmp_path / "run", {"t": torch.arange(5)}
    with sw.Checkpointer(root, memory=None) as cp:
        cp.save(7, state)
    for options in ({}, {"overwrite": True}):
        with pytest.raises(sw.CheckpointExistsError, match=r"run is the root.*step-00000007"):
            sw.save(root, state, **options)
    with pytest.raises(CheckpointException, match=r"run is the root.*another directory"):
        dcp.save(dict(state), storage_writer=StorageWriter(root))
    assert sorted(path.name for path in root.iterdir()) == ["run.json", "step-00000007"]
    sw.save(tmp_path / "one", state)
    for path in (tmp_path / "one").iterdir():
        path.rename(root / path.name)
    for start in (None, tmp_path / "one"):
        with pytest.raises(sw.CheckpointExistsError, match=r"Move manifest\.json and all r\*"):
            sw.Checkpointer(root, memory=None, start_from=start)


def test_integers_of_numpy_are_integers(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, save_every=np.int64(2), memory=None) as cp:  # type: ignore
        for step in np.arange(1, 5):
            cp.save(step, {"t": 1})
        assert cp.steps() == [2, 4]
        assert cp.restore({"t": 0}, step=np.int32(2)) == 2
    assert sw.Memory(snapshot_every=np.int16(3)).snapshot_every == 3  # type: ignore


def test_a_root_that_can_only_be_read_is_restored_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shardwise")
    root = tmp_path / "root"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    try:
        sw.save(root / "step-00000004", {"t": torch.arange(1000)}, step=4)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        for options in ({}, {"memory": sw.Memory()}, {"memory": None}):
            state = {"t": torch.zeros(1000, dtype=torch.int64)}
            with sw.Checkpointer(root, save_every=9, **options) as cp:
                assert cp.restore(state) == 4
                assert state["t"].tolist() == list(range(1000))
                cp.save(5, state)
                with pytest.raises(OSError, match="Read-only"):
                    cp.save(9, state)
        assert caplog.text.count("is read-only") == 2
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_a_compiled_function_saves_and_loads(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = model(x).sum()
        sw.save(tmp_path, {"model": model, "rows": 4})
        sw.load(tmp_path, {"model": model})
        return y * 2

    assert torch.equal(step(torch.ones(4)), model(torch.ones(4)).sum() * 2)
    assert torch.equal(sw.open(tmp_path)["model.weight"][...], model.weight)


def with_options_of_its_own(path: str) -> None:
    """Each rank saves as often, and protects as well, as it likes."""
    rank = dist.get_rank()
    memory = sw.Memory(dir=f"{path}/node{rank}", copies=rank)
    sw.Checkpointer(f"{path}/root", save_every=10 + rank, memory=memory)


def test_ranks_with_different_options_are_refused(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(with_options_of_its_own, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.MismatchError)
        assert outcome.exception.problems == [
            "save_every: rank 0 has 10, rank 1 has 11",
            "Memory(copies): rank 0 has 0, rank 1 has 1",
        ]
    assert not (tmp_path / "root").exists()


def begin_alone(path: str) -> None:
    """Only rank 0 says where to start."""
    start_from = None if dist.get_rank() else f"{path}/source"
    sw.Checkpointer(f"{path}/root", start_from=start_from, memory=None)


def with_an_invalid_option(root: str) -> None:
    with sw.Checkpointer(root, save_every=dist.get_rank(), memory=None):
        pass


def test_an_option_that_is_invalid_on_one_rank_fails_on_all(gang: Gang, tmp_path: Path) -> None:
    first, second = gang.run_outcomes(with_an_invalid_option, str(tmp_path), world=2)
    assert "expected at least 1" in str(first.exception)
    assert isinstance(second.exception, sw.RankError)
    assert "save_every=0" in str(second.exception)


def test_ranks_start_from_the_same(gang: Gang, tmp_path: Path) -> None:
    sw.save(tmp_path / "source", {"x": torch.ones(3)})
    for outcome in gang.run_outcomes(begin_alone, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.MismatchError)
        assert outcome.exception.problems == ["start_from: rank 0 has given, rank 1 has None"]


def save_when_it_likes(path: str, shm: str) -> list[str]:
    """On one rank alone, the step is due, or forced."""
    rank = dist.get_rank()
    memory = sw.Memory(dir=shm)
    said = []
    for step, force, each in (
        (5 + rank, False, None),
        (3, bool(rank), None),
        (3, bool(rank), memory),
    ):
        root = f"{path}/{len(said)}"
        with pytest.raises(sw.MismatchError) as caught:  # noqa: SIM117 - it is raised at the end
            with sw.Checkpointer(root, save_every=5, memory=each) as checkpointer:
                checkpointer.save(step, {"x": torch.ones(3)}, force=force)
        said.append(str(caught.value))
    return said


def test_ranks_that_do_not_save_the_same_steps_are_told(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    first, *others = gang.run(save_when_it_likes, str(tmp_path), str(shm), world=2)
    assert others == [first]
    place = tmp_path / "2" / "step-00000003"
    pairs = [
        ("agreeing on a save", "saving the last step"),
        ("saving the last step", "agreeing on a save"),
        (f"step 3 to memory, for {place}", f"step 3 to {place}"),
    ]
    for said, (zero, one) in zip(first, pairs, strict=True):
        assert f"rank 0: {zero}\n  - rank 1: {one}" in said


def with_an_end_of_its_own(path: str) -> None:
    """Each rank does what it likes after a signal."""
    after_signal: Literal["deliver", "return"] = "return" if dist.get_rank() else "deliver"
    sw.Checkpointer(path, save_on_signals=[signal.SIGUSR1], after_signal=after_signal, memory=None)


def test_ranks_end_in_the_same_way(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(with_an_end_of_its_own, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.MismatchError)
        assert outcome.exception.problems == [
            "after_signal: rank 0 has 'deliver', rank 1 has 'return'"
        ]


def save_swapped(root: Path, shm: Path | None) -> str:
    """Rank 0 passes its arguments in the wrong order; return what each rank is told."""
    memory = None if shm is None else sw.Memory(dir=str(shm))
    state = {"t": torch.ones(3)}
    arguments: tuple[Any, Any] = (state, 1) if dist.get_rank() == 0 else (1, state)
    with sw.Checkpointer(root, memory=memory, save_at_end=False) as checkpointer:
        try:
            checkpointer.save(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("in_memory", [False, True])
def test_swapped_arguments_are_explained_on_all_ranks(
    gang: Gang, tmp_path: Path, shm: Path, in_memory: bool
) -> None:
    told = gang.run(save_swapped, tmp_path / "run", shm if in_memory else None, world=2)
    assert told[0].startswith("TypeError: Checkpointer.save(step, state): step is a dict. The arg")
    assert "seem to be swapped: pass the step first" in told[1]
    assert not list((tmp_path / "run").glob("step-*"))
