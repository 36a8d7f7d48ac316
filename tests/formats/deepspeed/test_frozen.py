"""Optimizers of DeepSpeed without ZeRO that have frozen parameters in their param groups."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import GOLDEN_OR_LIVE, require_deepspeed, run
from tests.formats.foreign_goldens import unpacked
from tests.formats.programs.small_model import FrozenModel

CASES = ("float32", "bfloat16", "bfloat16-flat", "float16-flat")
AMBIGUOUS = "float32-alike"
FLAT = ("bfloat16-flat", "float16-flat")
FILE = "global_step3/mp_rank_00_model_states.pt"
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=GOLDEN_OR_LIVE)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of DeepSpeed 0.19.8, and what the engine had when it wrote them."""
    place = tmp_path_factory.mktemp("deepspeed-frozen")
    if request.param == "golden":
        return unpacked("deepspeed_frozen", place) / "deepspeed-frozen" / "2"
    require_deepspeed()
    run("train_deepspeed.py", str(place), *CASES, AMBIGUOUS, ranks=2)
    return place


@pytest.mark.parametrize("case", CASES)
def test_all_is_as_the_engine_had_it(saved: Path, case: str) -> None:
    found = sw.open(saved / case)
    assert not found.left_out
    expected = torch.load(saved / f"{case}.expected.pt", weights_only=True)
    wanted = {f"model.{name}": tensor for name, tensor in expected["parameters"].items()}
    wanted |= {f"optimizer.{name}": tensor for name, tensor in expected["moments"].items()}
    wanted |= {f"model.{name}": tensor for name, tensor in expected["frozen"].items()}
    for name, tensor in wanted.items():
        read = found[name][...]
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name
    groups = found["optimizer.param_groups"]
    assert [group["value"] for group in groups] == expected["groups"]
    trained = {*expected["parameters"]}
    members = [{*group["members"]} & trained for group in groups]
    assert members[0] | members[1] == trained
    assert all(expected["parameters"][name].dim() > 1 for name in members[0])
    assert all(expected["parameters"][name].dim() <= 1 for name in members[1])


@pytest.mark.parametrize("case", FLAT)
def test_training_resumes_from_it(saved: Path, case: str) -> None:
    model = FrozenModel()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) is matrices], "lr": 7.0}
        for matrices in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    sw.load(saved / case, {"model": model, "optimizer": optimizer}, cast=True)
    expected = torch.load(saved / f"{case}.expected.pt", weights_only=True)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    for name, parameter in model.named_parameters():
        assert bool(optimizer.state.get(parameter)) == parameter.requires_grad
        if parameter.requires_grad:
            assert torch.equal(parameter, expected["parameters"][name])
            moment = optimizer.state[parameter]["exp_avg"]
            assert torch.equal(moment, expected["moments"][f"{name}.exp_avg"])


def assert_ambiguous(place: Path) -> None:
    found = sw.open(place)
    assert not [name for name in found if name.startswith(("module.", "optimizer."))]
    (line,) = found.left_out
    assert line.startswith("optimizer.*: the checkpoint does not name the optimizer's parameters")
    assert "are ambiguous" in line
    assert found["model.layers.1.weight"].shape == (5, 5)


def test_shapes_alone_can_be_ambiguous(saved: Path) -> None:
    """A matrix without state may be a vector, as nothing says which parameters are frozen."""
    assert_ambiguous(saved / AMBIGUOUS)


@pytest.mark.parametrize("case", ["bfloat16", *FLAT])
def test_equal_values_are_ambiguous(saved: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(saved / case, tmp_path / case)
    held = torch.load(tmp_path / case / FILE, weights_only=False)
    module = held["module"]
    module["layers.2.weight"].copy_(module["layers.1.weight"])  # frozen, and trained
    torch.save(held, tmp_path / case / FILE)
    assert_ambiguous(tmp_path / case)


@pytest.mark.parametrize("case", ["bfloat16", *FLAT])
def test_masters_of_no_parameter_are_not_assigned(saved: Path, tmp_path: Path, case: str) -> None:
    shutil.copytree(saved / case, tmp_path / case)
    held = torch.load(tmp_path / case / FILE, weights_only=False)
    held["module"]["layers.3.weight"] += 1
    torch.save(held, tmp_path / case / FILE)
    assert_ambiguous(tmp_path / case)
