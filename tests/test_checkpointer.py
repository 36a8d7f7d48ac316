"""What is saved when, what is kept, and what is restored."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from tests.tools.gang import Gang

MANIFEST = "manifest.json"


def step_directory(step: int) -> str:
    return f"step-{step:08d}"


def state(value: float) -> dict[str, Any]:
    return {"t": torch.full((1000,), float(value)), "step": int(value)}


def fill(root: Path, *steps: int, **options: Any) -> None:
    with sw.Checkpointer(root, **options, memory=None) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step))


def damage(root: Path, step: int, name: str = "*.safetensors") -> None:
    """Flip a bit in the middle of a file."""
    victim = next((root / step_directory(step)).glob(name))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)


def test_it_saves_when_it_is_due_and_restores_the_newest(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, save_every=5, memory=None) as checkpointer:
        handles = [checkpointer.save(step, state(step)) for step in range(1, 13)]
        due = [handle for handle in handles if handle is not None]
        assert all(handle.done() for handle in due)
        assert [handle.result().step for handle in due] == [5, 10]
        assert (checkpointer.steps(), checkpointer.latest()) == ([5, 10], 10)
        target = state(0)
        assert checkpointer.restore(target) == 10
        assert target["step"] == 10
        assert target["t"].tolist() == [10.0] * 1000
        assert checkpointer.restore(target, step=5) == 5
        assert target["t"][0] == 5
        with pytest.raises(sw.CheckpointNotFoundError, match="step 7"):
            checkpointer.restore(target, step=7)


def test_an_empty_root_restores_nothing(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path / "new", memory=None) as checkpointer:
        assert checkpointer.restore(state(0)) is None
        assert checkpointer.latest() is None


def test_a_run_starts_from_another_until_it_has_something_of_its_own(tmp_path: Path) -> None:
    """And goes on with its step."""
    sw.save(tmp_path / "base", state(7), step=100)
    fill(tmp_path / "root", 50, 100)
    for start in (
        tmp_path / "base",
        tmp_path / "root",
        lambda target: sw.load(tmp_path / "base", target),
    ):
        target = state(0)
        with sw.Checkpointer(tmp_path / "run", start_from=start, memory=None) as checkpointer:
            assert checkpointer.restore(target) == 100
            assert checkpointer.last_restore is not None
            assert checkpointer.last_restore.source == "start"
            assert checkpointer.last_restore.step == 100
        assert target["step"] == (100 if start == tmp_path / "root" else 7)
    assert target["t"].tolist() == [7.0] * 1000
    with sw.Checkpointer(tmp_path / "run", start_from=start, memory=None) as checkpointer:
        checkpointer.save(1, state(1))
        assert checkpointer.restore(target) == 1
    assert target["t"][0] == 1


def training(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_a_run_that_starts_from_weights_alone_begins_at_the_beginning(tmp_path: Path) -> None:
    base, target = training(1.0), training(2.0)
    sw.save(tmp_path / "base", base, step=100)

    def weights(state: Any) -> sw.LoadReport:
        return sw.load(tmp_path / "base", {"model": state["model"]})

    with sw.Checkpointer(tmp_path / "a", start_from=weights, memory=None) as checkpointer:
        assert checkpointer.restore(target) is None
        assert checkpointer.last_restore is not None
        assert checkpointer.last_restore.step == 100
    assert torch.equal(target["model"].weight, base["model"].weight)
    start = tmp_path / "base"
    with sw.Checkpointer(tmp_path / "b", start_from=start, memory=None) as checkpointer:
        assert checkpointer.restore(target, only=["model.*"]) is None
        assert checkpointer.restore(target) == 100
    moments = [each["optimizer"].state_dict()["state"][0]["exp_avg"] for each in (base, target)]
    assert torch.equal(*moments)


def test_restore_chooses_and_converts(tmp_path: Path) -> None:
    keep = sw.Keep(last=9, best=sw.Best("loss"))
    with sw.Checkpointer(tmp_path, keep=keep, memory=None) as checkpointer:
        assert checkpointer.best() is None
        for step, loss in ((3, 0.5), (4, 0.25), (5, 1.0)):
            checkpointer.save(step, state(step), metrics={"loss": loss})
        assert checkpointer.best() == 4
        target = {"new": torch.zeros(1000, dtype=torch.float64), "step": -1, "other": 1}
        options: dict[str, Any] = {"rename": {"new": "t"}, "cast": True, "only": ["new", "step"]}
        assert checkpointer.restore(target, step="best", skip=["step"], **options) == 4
        assert target["new"].tolist() == [4.0] * 1000
        assert (target["step"], target["other"]) == (-1, 1)
        assert checkpointer.restore(target, step=sw.Best("loss", mode="max"), **options) == 5
        assert (target["step"], target["new"][0]) == (5, 5)
        assert checkpointer.restore(target, step=np.int64(4), **options) == 4
        with pytest.raises(
            sw.CheckpointNotFoundError, match=r"'accuracy' \(metrics there: loss\): "
        ):
            checkpointer.restore(target, step=sw.Best("accuracy"))
        with pytest.raises(sw.StateError, match="'first'"):
            checkpointer.restore(target, step="first")  # type: ignore[arg-type]
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for ask in (checkpointer.best, lambda: checkpointer.restore({}, step="best")):
            with pytest.raises(sw.StateError, match="Keep"):
                ask()


def test_a_chosen_step_that_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    damage(tmp_path, 1)
    with (
        sw.Checkpointer(tmp_path, memory=None) as checkpointer,
        pytest.raises(sw.CorruptionError, match="step 1: storage"),
    ):
        checkpointer.restore(state(0), step=1)


def test_a_root_is_opened_and_loaded(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for step, loss in ((1, 2.0), (2, 1.0), (3, float("inf"))):
            checkpointer.save(step, state(step), metrics={"loss": loss})
    (tmp_path / step_directory(9)).mkdir()  # of a save that was never finished
    assert sw.open(tmp_path).step == 3
    assert sw.open(tmp_path).metrics == {"loss": None}
    assert sw.open(tmp_path, step=sw.Best("loss")).metrics == {"loss": 1.0}
    target = state(0)
    for choice, step in (("newest", 3), (np.int32(1), 1), (sw.Best("loss", mode="max"), 1)):
        assert sw.load(tmp_path, target, step=choice).step == step  # type: ignore[arg-type]
        assert target["t"].tolist() == [float(step)] * 1000
    with pytest.raises(sw.CheckpointNotFoundError, match=r"\(newest steps: 1, 2, 3\): choose one"):
        sw.open(tmp_path, step=9)
    with pytest.raises(sw.StateError, match="leave out step="):
        sw.open(tmp_path / step_directory(1), step=1)
    with pytest.raises(sw.StateError, match="'newest'"):
        sw.open(tmp_path, step="latest")  # type: ignore[arg-type]
    for each in (1, 2, 3):
        (tmp_path / step_directory(each) / MANIFEST).unlink()
    with pytest.raises(sw.CheckpointNotFoundError, match="no save below it has completed: check"):
        sw.open(tmp_path)


@pytest.mark.parametrize("name", ["*.safetensors", MANIFEST])
def test_damage_falls_back_to_the_one_before_and_says_why(tmp_path: Path, name: str) -> None:
    fill(tmp_path, 1, 2, 3)
    damage(tmp_path, 3, name)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 2
        assert target["t"].tolist() == [2.0] * 1000
        report = checkpointer.last_restore
        assert report is not None
        ((step, reason),) = report.skipped
        assert step == 3
        assert str(tmp_path / step_directory(3)) in reason
        checkpointer.save(3, state(3))  # what was found damaged may be replaced
        assert checkpointer.restore(target) == 3


def test_if_all_are_damaged_that_is_an_error_that_lists_them(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    damage(tmp_path, 1)
    damage(tmp_path, 2)
    with (
        sw.Checkpointer(tmp_path, memory=None) as checkpointer,
        pytest.raises(sw.CorruptionError) as caught,
    ):
        checkpointer.restore(state(0))
    assert "step 1:" in str(caught.value)
    assert "step 2:" in str(caught.value)


def test_what_is_intact_but_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer, pytest.raises(sw.MismatchError):
        checkpointer.restore({"t": torch.zeros(3)})


def test_a_step_is_not_overwritten_unasked(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        with pytest.raises(sw.CheckpointExistsError):
            checkpointer.save(1, state(5))
        checkpointer.save(1, state(5), overwrite=True)
        target = state(0)
        checkpointer.restore(target)
        assert target["step"] == 5
    names = [each.name for each in (tmp_path / step_directory(1)).iterdir()]
    assert len([name for name in names if not name.startswith("telemetry-")]) == 2
    assert len(names) <= 3


def test_retention_keeps_by_every_rule(tmp_path: Path) -> None:
    keep = sw.Keep(last=2, multiple_of=4, best=sw.Best("loss"))
    with sw.Checkpointer(tmp_path, keep=keep, memory=None) as checkpointer:
        for step, loss in enumerate([5.0, 1.0, 4.0, 3.0, 6.0, 7.0, 8.0], start=1):
            checkpointer.save(step, state(step), metrics={"loss": loss})
        assert checkpointer.steps() == [2, 4, 6, 7]


def test_a_metric_that_keep_needs_must_be_given(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, keep=sw.Keep(best=sw.Best("loss")), memory=None) as checkpointer:
        with pytest.raises(sw.StateError, match="loss"):
            checkpointer.save(1, state(1), metrics={"los": 1.0})
        checkpointer.save(1, state(1), metrics={"loss": float("nan")})


def test_a_step_that_was_not_there_is_not_taken_for_damaged(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        with pytest.raises(sw.CheckpointNotFoundError, match="step 9"):
            checkpointer.restore(state(0), step=9)
        fill(tmp_path, 9)
        with pytest.raises(sw.CheckpointExistsError):
            checkpointer.save(9, state(5))


def test_a_run_that_diverges_keeps_its_checkpoints(tmp_path: Path) -> None:
    with sw.Checkpointer(
        tmp_path, keep=sw.Keep(last=1, best=sw.Best("loss")), memory=None
    ) as checkpointer:
        for step, loss in enumerate([2.0, float("nan"), float("inf"), 3.0], start=1):
            checkpointer.save(step, state(step), metrics={"loss": loss, "done": True})
        assert checkpointer.steps() == [1, 4]
        assert checkpointer.restore(state(0)) == 4
    checkpoint = sw.open(tmp_path / step_directory(4))
    assert checkpoint.layout.metrics == {"loss": 3.0, "done": 1.0}
    sw.save(tmp_path / "alone", state(1), metrics={"loss": float("-inf")})
    assert sw.open(tmp_path / "alone").layout.metrics == {"loss": None}


def test_what_is_open_is_not_removed(tmp_path: Path) -> None:
    """An open checkpoint stays as long as it, or a tensor of it, is referenced."""
    with sw.Checkpointer(tmp_path, keep=sw.Keep(last=1), memory=None) as checkpointer:
        checkpointer.save(1, state(1))
        opened = sw.open(tmp_path)
        checkpointer.save(2, state(2))
        tensor = opened["t"]
        del opened
        checkpointer.save(3, state(3))
        assert checkpointer.steps() == [1, 3]
        assert torch.equal(tensor[...], state(1)["t"])
        del tensor
        checkpointer.save(4, state(4))
        assert checkpointer.steps() == [4]


def test_an_error_tells_that_a_step_was_removed_while_it_was_read(tmp_path: Path) -> None:
    """Here by a program that takes no locks."""
    fill(tmp_path, 1, 2)
    opened = sw.open(tmp_path, step=1)
    shutil.rmtree(tmp_path / step_directory(1))
    with pytest.raises(sw.CheckpointNotFoundError, match="was removed by retention"):
        opened["t"][...]


def test_an_error_tells_that_a_step_was_replaced_while_it_was_read(tmp_path: Path) -> None:
    """Here by a program that takes no locks."""
    fill(tmp_path, 1)
    opened = sw.open(tmp_path, step=1)
    shutil.rmtree(tmp_path / step_directory(1))
    fill(tmp_path, 1)
    with pytest.raises(sw.CheckpointNotFoundError, match="was replaced by another save"):
        opened["t"][...]


def test_a_damaged_newest_never_costs_the_newest_that_is_intact(tmp_path: Path) -> None:
    fill(tmp_path, 1, 2, 9)
    damage(tmp_path, 9)
    with sw.Checkpointer(tmp_path, keep=sw.Keep(last=1), memory=None) as checkpointer:
        assert checkpointer.restore(state(0)) == 2
        checkpointer.save(3, state(3))
        assert checkpointer.restore(state(0)) == 3
        assert set(checkpointer.steps()) == {3, 9}


def test_leftovers_are_collected_and_nothing_else(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    first, second = tmp_path / step_directory(1), tmp_path / step_directory(2)
    second.mkdir()
    leftovers = [
        first / "r00000-0123456789abcdef.safetensors",
        first / ".manifest.json.01234567",
        second / "saving-0123456789abcdef.lock",
        second / "r00001-0123456789abcdef.safetensors",
    ]
    for path in [*leftovers, first / "notes.txt"]:
        path.write_text("x")
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.steps() == [1]
        assert not any(path.exists() for path in leftovers)
        assert (first / "notes.txt").exists()
        assert not second.exists()
        assert checkpointer.restore(state(0)) == 1


def test_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every"):
        sw.Checkpointer(tmp_path, save_every=0, memory=None)
    with pytest.raises(ValueError, match="last"):
        sw.Keep(last=0)
    with (
        pytest.raises(ValueError, match="step=-1"),
        sw.Checkpointer(tmp_path, memory=None) as checkpointer,
    ):
        checkpointer.save(-1, {})


def fall_back(root: str) -> tuple[int | None, float, str]:
    target = {"t": torch.zeros(1000)}
    with sw.Checkpointer(root, memory=None) as checkpointer:
        step = checkpointer.restore(target, strict=False)
        report = checkpointer.last_restore
        return step, float(target["t"].sum()), report.skipped[0][1] if report else ""


def test_all_ranks_fall_back_together(gang: Gang, tmp_path: Path) -> None:
    fill(tmp_path, 1, 2)
    damage(tmp_path, 2)
    results = gang.run(fall_back, str(tmp_path), world=3)
    assert {(step, total) for step, total, _ in results} == {(1, 1000.0)}
    assert len({reason for _, _, reason in results}) == 1


@pytest.mark.parametrize("step", [None, "3", 1.0, True, -1])
def test_a_step_that_is_none_is_refused_whether_it_would_be_due_or_not(
    tmp_path: Path, step: object
) -> None:
    with sw.Checkpointer(tmp_path, save_every=2, memory=None) as cp, pytest.raises(sw.StateError):
        cp.save(step, {"t": 1})  # type: ignore[arg-type]
