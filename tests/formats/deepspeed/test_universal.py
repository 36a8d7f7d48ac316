"""Universal checkpoints that DeepSpeed's own converter made, against what the engine had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import CONVERTED, Checkpoints
from tests.formats.deepspeed.test_native import same
from tests.formats.reference import read_tensors

pytestmark = pytest.mark.timeout(400)


def opened(place: Path) -> sw.Checkpoint:
    return sw.open(place, format="deepspeed-universal")


@pytest.mark.parametrize("case", CONVERTED)
def test_all_is_as_the_engine_had_it(checkpoints: Checkpoints, case: str) -> None:
    place, expected = checkpoints.place(case) / "universal", checkpoints.expected(case)
    found = opened(place)
    tensors = read_tensors(place, found.layout)
    wanted = {f"model.{name}": tensor for name, tensor in expected["parameters"].items()}
    wanted |= {f"optimizer.{name}": tensor for name, tensor in expected["moments"].items()}
    for kind in ("frozen", "buffers"):  # which DeepSpeed does not restore
        wanted |= {f"model.{name}": tensor for name, tensor in expected[kind].items()}
    steps = {f"optimizer.{name}.step": torch.tensor(3.0) for name in expected["parameters"]}
    wanted |= steps
    assert [name for name, tensor in wanted.items() if not same(tensors[name], tensor)] == []
    beside = {name for name in tensors if not name.startswith("module.")} - set(wanted)
    assert beside == {"model.head.weight"}
    groups = found["optimizer.param_groups"]
    assert [group["value"] for group in groups] == expected["groups"]
    assert [len(group["members"]) for group in groups] == [3, 3]
    assert found["client_state.note"] == "hello"
    assert found["deepspeed.loss_scaler"]["cur_scale"] == (16 if case == "zero2-float16" else 1)
    assert (found.step, found.world_size) == (3, 2)


def test_a_root_with_both_is_read_as_native(checkpoints: Checkpoints) -> None:
    place = checkpoints.place(CONVERTED[0])
    assert sw.open(place).layout.format == "DeepSpeed"
    assert opened(place).layout.format == "DeepSpeed universal"
    assert sw.open(place / "universal").layout.format == "DeepSpeed universal"


def test_a_root_with_universal_ones_only_is_recognised(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints.place(CONVERTED[0]) / "universal", tmp_path / "universal")
    (tmp_path / "latest_universal").write_text("universal")
    assert sw.open(tmp_path).layout.format == "DeepSpeed universal"
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(tmp_path, format="deepspeed")


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("zero/first.weight/fp32.pt", "1 is missing: zero/first.weight/fp32.pt"),
        ("zero/first.weight/exp_avg.pt", "1 is missing: zero/first.weight/exp_avg.pt"),
        ("zero/first.weight/step.pt", "1 is missing: zero/first.weight/step.pt"),
        ("zero/optimizer_state.pt", "refers to the file 'zero/optimizer_state.pt'"),
    ],
)
def test_a_lost_file_is_told(
    checkpoints: Checkpoints, tmp_path: Path, lost: str, said: str
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place(CONVERTED[0]) / "universal", place)
    (place / lost).unlink()
    with pytest.raises(sw.FormatError, match=said):
        opened(place)


@pytest.mark.parametrize("case", CONVERTED)
def test_a_key_that_is_lost_of_all_parameters_is_told(
    checkpoints: Checkpoints, tmp_path: Path, case: str
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place(case) / "universal", place)
    for path in place.glob("zero/*/exp_avg_sq.pt"):
        path.unlink()
    with pytest.raises(sw.FormatError, match=r"missing: zero/embedding\.weight/exp_avg_sq\.pt"):
        opened(place)


@pytest.mark.parametrize("key", ["fp32", "exp_avg", "exp_avg_sq"])
def test_a_state_of_another_shape_is_told(
    checkpoints: Checkpoints, tmp_path: Path, key: str
) -> None:
    place = tmp_path / "copy"
    shutil.copytree(checkpoints.place(CONVERTED[0]) / "universal", place)
    path = place / "zero" / "first.weight" / f"{key}.pt"
    held = torch.load(path)
    held["param"] = held["param"][:-1].clone()
    torch.save(held, path)
    said = rf"{key}.pt: its shape is \[6, 5\], but its parameter has shape \[7, 5\]"
    with pytest.raises(sw.FormatError, match=said):
        opened(place)
