"""DCP that was exported: torch itself loads it, on one rank and into other parallelism on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import shardwise as sw
from tests.breadth import mostly_long
from tests.formats.comparing import assert_same
from tests.formats.test_dcp import torch_loads
from tests.multirank.models import build, train
from tests.tools.gang import Gang


def tensors_of(place: Path) -> dict[str, torch.Tensor]:
    return {name: tensor[...] for name, tensor in sw.open(place).tensors().items()}


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """In several files, the largest tensors cut."""
    state = build("plain", 1)
    train(state)
    rest = {"ema": {"none": torch.zeros(0, 3), "list": [torch.ones(2), {"a": 1}]}, "name": "x"}
    sw.save(tmp_path / "source", {**state, **rest})
    report = sw.export(tmp_path / "source", tmp_path / "dcp", to="dcp", max_file=300)
    assert not report.left_out
    files = sorted(path.name for path in (tmp_path / "dcp").iterdir())
    assert files == [".metadata", *sorted(f"__{i}_0.distcp" for i in range(report.files))]
    assert report.files > 20
    return tmp_path / "dcp"


def test_torch_loads_all_of_it(exported: Path) -> None:
    source = exported.parent / "source"
    saved, loaded = tensors_of(source), torch_loads(exported)
    model = {f"model.{name}": tensor for name, tensor in loaded["model"].items()}
    assert_same(model, {name: saved[name] for name in model})
    assert len(model) == sum(name.startswith("model.") for name in saved)
    held = {k: t for k, t in loaded["optimizer"].items() if k.startswith("state.")}
    expected = {k: saved[k.replace("state.", "optimizer.", 1)] for k in held}
    assert_same(held, expected)
    assert len(held) == sum(name.startswith("optimizer.") for name in saved)
    settings = by_member(sw.open(source)["optimizer.param_groups"])["blocks.0.norm.bias"]
    assert loaded["optimizer"]["param_groups.blocks.0.norm.bias.lr"] == settings["lr"]
    assert "blocks.0.norm.bias" in loaded["optimizer"]["param_groups.1.params"]
    assert loaded["scheduler"] == sw.open(source)["scheduler"]
    assert (loaded["step"], loaded["name"]) == (1, "x")
    assert_same(loaded["ema"]["none"], torch.zeros(0, 3))
    assert_same(loaded["ema"]["list"], [torch.ones(2), {"a": 1}])


def test_it_is_read_in_place_again(exported: Path) -> None:
    saved, again = tensors_of(exported.parent / "source"), tensors_of(exported)
    assert_same({name: again[name] for name in saved}, saved)
    groups = [
        sw.open(each)["optimizer.param_groups"] for each in (exported, exported.parent / "source")
    ]
    assert groups[0] == groups[1]


def test_a_tied_tensor_is_stored_once(tmp_path: Path) -> None:
    weight = torch.randn(50, 50)
    sw.save(tmp_path / "source", {"model": {"embed": weight, "head": weight}})
    report = sw.export(tmp_path / "source", tmp_path / "dcp", to="dcp", dtype="bfloat16")
    assert 5_000 < report.bytes_written < 10_000
    into = {"model": {name: torch.zeros(50, 50).bfloat16() for name in ("embed", "head")}}
    dcp.load(into, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same(into["model"], {name: weight.bfloat16() for name in ("embed", "head")})


@pytest.mark.parametrize("flat", mostly_long([True, False], [False]))
def test_fsdp_goes_on_from_it(gang: Gang, exported: Path, tmp_path: Path, flat: bool) -> None:
    gang.run(resume, str(exported), str(tmp_path / "again"), flat, world=2)
    saved, again = tensors_of(exported.parent / "source"), tensors_of(tmp_path / "again")
    wanted = {name: tensor for name, tensor in saved.items() if not name.startswith("ema")}
    assert_same({name: again[name] for name in wanted}, wanted)
    settings = [sw.open(each)["optimizer.param_groups"] for each in (tmp_path / "again", exported)]
    assert by_member(settings[0]) == by_member(settings[1])


def by_member(groups: Any) -> dict[str, Any]:
    return {member: group["value"] for group in groups for member in group["members"]}


def resume(place: str, root: str, flat: bool) -> None:
    """Load as torch's documentation says, and save what there is then."""
    state = build("fsdp2", 2)
    train(state)
    model, optimizer = state["model"], state["optimizer"]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    held, state_of = get_state_dict(model, optimizer, options=options)
    dcp.load({"model": held, "optimizer": state_of}, checkpoint_id=place)
    set_state_dict(
        model, optimizer, model_state_dict=held, optim_state_dict=state_of, options=options
    )
    del state["scheduler"], state["step"]
    sw.save(root, state)
