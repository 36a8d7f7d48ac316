"""The trained part of a model under one parallelism goes on under another, on the same base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import shardwise as sw
from tests.breadth import mostly_long
from tests.multirank.models import CPU, WORLDS, Model, Schedulers, module_of, parallelize, train
from tests.multirank.test_matrix import contents
from tests.tools.gang import Gang

KINDS = ["plain", "ddp", "fsdp1", "fsdp1_flat", "fsdp2", "fsdp2_uneven", "fsdp_tp", "pipeline_fsdp"]
PAIRS = [("plain", "fsdp2_uneven"), ("fsdp1_flat", "pipeline_fsdp")]


def build(kind: str, base: int, norms: float) -> dict[str, Any]:
    """A state whose model trains only its norms."""
    torch.manual_seed(base)
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
        if parameter.requires_grad:
            nn.init.constant_(parameter, norms)
    parts = parallelize(kind, model)
    optimizers = [
        torch.optim.AdamW([p for p in module_of(part).parameters() if p.requires_grad])
        for part in parts
    ]
    alone = len(parts) == 1
    return {
        "model": sw.trainable(parts[0] if alone else parts, base=f"base {base}"),
        "optimizer": optimizers[0] if alone else optimizers,
        "scheduler": Schedulers(optimizers),
    }


def begin(kind: str, place: str, whole: str) -> None:
    state = build(kind, base=1, norms=0.5)
    train(state)
    sw.save(place, state)
    train(state)
    sw.save(whole, state)


def go_on(kind: str, place: str, resumed: str) -> None:
    state = build(kind, base=1, norms=9.0)
    sw.load(place, state)
    train(state)
    sw.save(resumed, state)


def on_another_base(kind: str, place: str) -> tuple[str, bool]:
    state = build(kind, base=2, norms=9.0)
    parameters = [*module_of(state["model"].module).parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(place, state)
    unchanged = all(
        torch.equal(getattr(old, "_local_tensor", old), getattr(new, "_local_tensor", new))
        for old, new in zip(before, parameters, strict=True)
    )
    return str(caught.value), unchanged


def trained(place: Path) -> dict[str, Any]:
    return {name: value for name, value in contents(place).items() if "._frozen." not in name}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("before", "after"), mostly_long([(a, b) for a in KINDS for b in KINDS if a != b], PAIRS)
)
def test_a_run_goes_on_under_another_parallelism(
    gang: Gang, tmp_path: Path, before: str, after: str
) -> None:
    paths = {name: str(tmp_path / name) for name in ("place", "whole", "resumed")}
    gang.run(begin, before, paths["place"], paths["whole"], world=WORLDS[before])
    gang.run(go_on, after, paths["place"], paths["resumed"], world=WORLDS[after])
    assert trained(tmp_path / "resumed") == trained(tmp_path / "whole")
    assert not any(".up.weight" in name for name in trained(tmp_path / "whole"))
    for message, unchanged in gang.run(on_another_base, after, paths["place"], world=WORLDS[after]):
        assert "base 1 at the save, base 2 now" in message
        assert "blocks.2.up.weight: frozen, other values than at the save" in message
        assert unchanged


@pytest.mark.ranks
@pytest.mark.parametrize("kind", mostly_long(KINDS, ["fsdp1", "fsdp2_uneven", "pipeline_fsdp"]))
def test_what_describes_the_base_does_not_depend_on_the_parallelism(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    gang.run(save_base, "plain", str(whole), world=1)
    gang.run(save_base, kind, str(sharded), world=WORLDS[kind])
    described = [
        {name: value for name, value in contents(each).items() if "._frozen." in name}
        for each in (whole, sharded)
    ]
    assert described[1] == described[0]
    assert len(described[0]) > 20


def save_base(kind: str, place: str) -> None:
    sw.save(place, {"model": build(kind, base=1, norms=0.5)["model"]})


class Tied(nn.Module):
    """Two names of one frozen weight, and a trained layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.head = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.second.weight = self.first.weight.requires_grad_(False)


def tied_names(place: str) -> list[str]:
    model = FullyShardedDataParallel(Tied(0), use_orig_params=True, device_id=CPU)
    sw.save(place, {"model": sw.trainable(model)})
    sw.load(place, {"model": sw.trainable(model)})
    return [name for name in sw.open(place) if "elements" not in name]


@pytest.mark.ranks
def test_second_names_of_a_frozen_parameter_are_frozen(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(tied_names, str(tmp_path), world=2) == [["model.head.weight"]] * 2
    sw.load(tmp_path, {"model": sw.trainable(Tied(0))})


def train_others(kind: str, place: str, whole: str) -> None:
    """Train the norms, and then other weights with another optimizer; save at the end."""
    state = build(kind, base=1, norms=0.5)
    train(state)
    model = state["model"].module
    module = module_of(model)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".up." in name)
    trained_now = [each for each in module.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained_now)
    train({"model": state["model"], "optimizer": optimizer, "scheduler": Schedulers([optimizer])})
    sw.save(place, {"model": sw.trainable(model)})
    sw.save(whole, {"model": model})


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    mostly_long(["plain", "fsdp1", "fsdp2", "fsdp2_uneven", "fsdp_tp"], ["plain", "fsdp2_uneven"]),
)
def test_what_was_trained_earlier_is_kept(gang: Gang, tmp_path: Path, kind: str) -> None:
    place, whole = tmp_path / "place", tmp_path / "whole"
    gang.run(train_others, kind, str(place), str(whole), world=WORLDS[kind])
    kept, everything = trained(place), contents(whole)
    assert any("norm" in name for name in kept)
    assert any(".up." in name for name in kept)
    assert len(kept) < len(everything)
    assert kept == {name: everything[name] for name in kept}
    state = build("plain", base=1, norms=9.0)
    sw.load(place, {"model": state["model"]})
    sw.save(tmp_path / "restored", {"model": state["model"].module})
    assert contents(tmp_path / "restored") == everything


def wrapped_later(place: str) -> list[str]:
    """DDP sends all parameters to all ranks, which torch counts as a change."""
    model = Tied(0)
    sw.trainable(model)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    sw.save(place, {"model": sw.trainable(wrapped)})
    return [*sw.open(place).tensors()]


@pytest.mark.ranks
def test_a_base_that_ddp_sends_stays_the_base(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(wrapped_later, str(tmp_path), world=2) == [["model.head.weight"]] * 2


def change_out_of_sight(place: str) -> str:
    """Change shards of the base in a way that torch does not count."""
    model = build("fsdp2_uneven", base=1, norms=0.5)["model"]
    sw.save(f"{place}/before", {"model": model})
    for parameter in module_of(model.module).parameters():
        if not parameter.requires_grad:
            parameter.to_local().data.mul_(2)
    with pytest.raises(sw.ShardwiseError) as caught:
        sw.save(f"{place}/after", {"model": model})
    return str(caught.value)


@pytest.mark.ranks
def test_shards_that_change_out_of_sight_are_refused(gang: Gang, tmp_path: Path) -> None:
    for message in gang.run(change_out_of_sight, str(tmp_path), world=WORLDS["fsdp2_uneven"]):
        assert "frozen, but its values have changed since the first save" in message
        assert "also=['" in message
    assert not (tmp_path / "after").exists()
