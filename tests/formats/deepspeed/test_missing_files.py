"""Directories of DeepSpeed that were copied in part: what is missing is named, none is opened."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw

TAG = "global_step10"
MODEL = "{}mp_rank_{:02}_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_{:02}_optim_states.pt"


def write(place: Path, *, stage: int = 1, ranks: int = 4, parallel: int = 1, **more: Any) -> Path:
    """What ranks would have written of a parameter; no values that matter."""
    folder = place / TAG
    folder.mkdir(parents=True)
    (place / "latest").write_text(TAG)
    (place / "zero_to_fp32.py").touch()
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}}
    torchs = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    flat = [torch.zeros(3)]
    if stage == 3:
        optimizer = {"fp32_flat_groups": flat, "optimizer_state_dict": torchs}
        optimizer["partition_count"] = ranks  # type: ignore[assignment]
    else:
        optimizer = {"single_partition_of_fp32_groups": flat, "base_optimizer_state": torchs}
        optimizer |= {"partition_count": [ranks], "param_alignment_paddings": [[0]]}
    model = {
        "module": {"w": torch.zeros(3, ranks) if stage < 3 else torch.zeros(0)},
        "buffer_names": [],
        "param_shapes": [{"w": torch.Size((3, ranks))}],
        "dp_world_size": ranks,
        "mp_world_size": parallel,
        **more,
    }
    for rank in range(parallel):
        for data in range(ranks):
            torch.save({"optimizer_state_dict": optimizer}, folder / OPTIMIZER.format(data, rank))
            if stage == 3 or data == 0:
                start = f"zero_pp_rank_{data}_" if stage == 3 else ""
                torch.save(model, folder / MODEL.format(start, rank))
    return folder


def assert_told(place: Path, *names: str) -> None:
    with pytest.raises(sw.FormatError) as caught:
        sw.open(place)
    expected = (
        f"{len(names)} {'is' if len(names) == 1 else 'are'} missing: {', '.join(names)}. Copy"
    )
    assert expected in str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_file_of_an_optimizer(tmp_path: Path, stage: int, rank: int) -> None:
    folder = write(tmp_path, stage=stage)
    assert "model.w" in sw.open(tmp_path)
    (folder / OPTIMIZER.format(rank, 0)).unlink()
    assert_told(tmp_path, f"{TAG}/{OPTIMIZER.format(rank, 0)}")
    assert_told(folder, OPTIMIZER.format(rank, 0))


@pytest.mark.parametrize("stage", [1, 3])
def test_all_of_an_optimizer(tmp_path: Path, stage: int) -> None:
    """What is left of ZeRO 1 looks like a checkpoint without ZeRO."""
    folder = write(tmp_path, stage=stage, ranks=2)
    for path in folder.glob("*_optim_states.pt"):
        path.unlink()
    assert_told(tmp_path, *(f"{TAG}/{OPTIMIZER.format(rank, 0)}" for rank in range(2)))


def test_a_rank_of_zero_3(tmp_path: Path) -> None:
    folder = write(tmp_path, stage=3)
    names = [MODEL.format("zero_pp_rank_3_", 0), OPTIMIZER.format(3, 0)]
    for name in names:
        (folder / name).unlink()
    assert_told(tmp_path, *(f"{TAG}/{name}" for name in names))


@pytest.mark.parametrize("stage", [1, 3])
def test_all_model_states(tmp_path: Path, stage: int) -> None:
    folder = write(tmp_path, stage=stage)
    for path in folder.glob("*_model_states.pt"):
        path.unlink()
    for place in (tmp_path, folder):
        with pytest.raises(sw.FormatError, match=r"all files of model states .* are missing"):
            sw.open(place)


@pytest.mark.parametrize("pattern", ["mp_rank_01_*", "*mp_rank_01_*"])
def test_a_model_parallel_rank(tmp_path: Path, pattern: str) -> None:
    folder = write(tmp_path, ranks=1, parallel=2)
    lost = sorted(folder.glob(pattern))
    for path in lost:
        path.unlink()
    assert_told(tmp_path, *(f"{TAG}/{path.name}" for path in lost))


def test_a_layer_of_a_pipeline(tmp_path: Path) -> None:
    shapes = [{"0.weight": torch.Size((3, 1)), "2.weight": torch.Size((3, 1))}]
    folder = write(tmp_path, ranks=1, module=None, param_shapes=shapes)
    assert_told(tmp_path, *(f"{TAG}/layer_{n:02}-model_states.pt" for n in (0, 2)))
    torch.save({"weight": torch.zeros(3, 1)}, folder / "layer_00-model_00-model_states.pt")
    assert_told(tmp_path, f"{TAG}/layer_02-model_00-model_states.pt")


def test_an_expert(tmp_path: Path) -> None:
    folder = write(tmp_path, ranks=1, num_experts=[2])
    name = "layer_0_expert_{}_mp_rank_00_model_states.pt"
    torch.save({"e": torch.zeros(1)}, folder / name.format(0))
    assert_told(tmp_path, f"{TAG}/{name.format(1)}")


def test_absurdly_many_ranks_are_not_counted(tmp_path: Path) -> None:
    write(tmp_path, ranks=1, dp_world_size=2**40, mp_world_size=2**40)
    with pytest.raises(sw.FormatError, match="more than 1048576 files"):
        sw.open(tmp_path)


def test_the_tag_that_is_latest(tmp_path: Path) -> None:
    folder = write(tmp_path)
    shutil.copytree(folder, tmp_path / "global_step5")
    (tmp_path / "latest").write_text("global_step20")
    said = r"'global_step20', which 'latest' names, is missing: copy it .*: global_step10, global"
    with pytest.raises(sw.FormatError, match=said):
        sw.open(tmp_path)
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "global_step5")
    with pytest.raises(sw.FormatError, match=r"'global_step20', which 'latest' names, is missing"):
        sw.open(tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_of_the_files_of_ranks(tmp_path: Path, stage: int) -> None:
    """The weights of one rank may be what is wanted; no part of them is."""
    folder = write(tmp_path, stage=stage)
    for path in folder.iterdir():
        if path.name == MODEL.format("", 0):
            assert any(f"open {folder}" in line for line in sw.open(path).left_out)
        else:
            with pytest.raises(sw.CheckpointNotFoundError, match=re.escape(f"open {folder}")):
                sw.open(path)
