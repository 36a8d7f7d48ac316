"""Loads into tensors that have grown or shrunk since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.equal import same_bytes
from tests.tools.gang import Gang

RESIZE = {"model.embed.weight": "keep-common"}
MOMENTS = ("exp_avg", "exp_avg_sq")


def made(vocabulary: int, *, tied: bool = False, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers = {"embed": nn.Embedding(vocabulary, 4), "head": nn.Linear(4, vocabulary, bias=False)}
    model = nn.ModuleDict(layers)
    if tied:
        model["head"].weight = model["embed"].weight
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def trained(state: dict[str, Any]) -> dict[str, Any]:
    for parameter in state["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    state["optimizer"].step()
    return state


def check(old: dict[str, Any], new: dict[str, Any], before: torch.Tensor, name: str) -> None:
    """What both have in common is the old one's; the rest is as it was, and has no moments."""
    common = min(len(old["model"][name].weight), len(before))
    was, now = (each["model"][name].weight for each in (old, new))
    assert same_bytes(now[:common], was[:common])
    assert same_bytes(now[common:], before[common:])
    for moment in MOMENTS:
        saved, loaded = (e["optimizer"].state[p][moment] for e, p in ((old, was), (new, now)))
        assert loaded.shape == now.shape
        assert same_bytes(loaded[:common], saved[:common])
        assert not loaded[common:].any()
    assert new["optimizer"].state[now]["step"] == 1


@pytest.mark.parametrize("vocabulary", [9, 3], ids=["grown", "shrunk"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("numbered", [False, True])
def test_a_vocabulary_is_resized(
    tmp_path: Path, vocabulary: int, tied: bool, numbered: bool
) -> None:
    old, new = trained(made(6, tied=tied)), made(vocabulary, tied=tied, seed=1)
    before = {name: new["model"][name].weight.detach().clone() for name in ("embed", "head")}
    place = tmp_path / "saved.pt"
    if numbered:  # as torch saves an optimizer
        torch.save({name: each.state_dict() for name, each in old.items()}, place)
    else:
        sw.save(place, old)
    with pytest.raises(sw.MismatchError, match=rf"embed.weight: shape \[6, 4\] .* \[{vocabulary}"):
        sw.load(place, new)
    assert same_bytes(new["model"]["embed"].weight, before["embed"])
    resize = RESIZE if tied else {"model.*.weight": "keep-common"}
    sw.load(place, new, resize=resize)
    for name in ("embed",) if tied else ("embed", "head"):
        check(old, new, before[name], name)
    trained(new)


def test_what_is_not_named_is_not_resized(tmp_path: Path) -> None:
    sw.save(tmp_path, trained(made(6)))
    new = made(9, seed=1)
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, new, resize=RESIZE)
    assert {problem.split(":")[0] for problem in caught.value.problems} >= {"model.head.weight"}
    assert not any("embed" in problem for problem in caught.value.problems)


def test_wrong_use_is_said(tmp_path: Path) -> None:
    sw.save(tmp_path, made(6))
    with pytest.raises(sw.StateError, match="expected 'keep-common'"):
        sw.load(tmp_path, made(9), resize={"model.embed.weight": "pad"})
    with pytest.raises(sw.StateError, match="expected a mapping of names"):
        sw.load(tmp_path, made(9), resize="keep-common")  # type: ignore[arg-type]
    with pytest.raises(
        sw.MismatchError, match=r"match no tensor of the state; correct them:\n  - model.embd"
    ):
        sw.load(tmp_path, made(9), resize={"model.embd": "keep-common"})
    with torch.device("meta"):
        empty = made(9)
    with pytest.raises(sw.StateError, match="on the meta device"):
        sw.load(tmp_path, {"model": empty["model"]}, resize={"model.*": "keep-common"})
    with torch.device("meta"):
        smaller = made(3)
    sw.load(tmp_path, {"model": smaller["model"]}, resize={"model.*": "keep-common"})
    assert same_bytes(smaller["model"]["embed"].weight, made(6)["model"]["embed"].weight[:3])


def test_factored_moments_are_not_resized(tmp_path: Path) -> None:
    states = [{"model": made(n)["model"]} for n in (6, 9)]
    for state in states:
        state["optimizer"] = torch.optim.Adafactor(state["model"].parameters())
    old, new = states
    sw.save(tmp_path, trained(old))
    resize = {"model.*": "keep-common"}
    with pytest.raises(
        sw.StateError, match=r"embed\.weight\.row_var: cannot resize this state of shape \[6, 1\]"
    ):
        sw.load(tmp_path, new, resize=resize)
    sw.load(tmp_path, new, resize=resize, skip=["optimizer.*"])
    for name in ("embed", "head"):
        assert same_bytes(new["model"][name].weight[:6], old["model"][name].weight)
    trained(new)


def sharded(path: str) -> bool:
    mesh = init_device_mesh("cpu", (2,))
    old, new = trained(made(6)), made(9, seed=1)
    before = new["model"]["embed"].weight.detach().clone()
    for layer in new["model"].values():
        fully_shard(layer, mesh=mesh)
    new["optimizer"] = torch.optim.AdamW(new["model"].parameters())
    sw.load(path, new, resize={"model.*": "keep-common"})
    weight = new["model"]["embed"].weight
    moment = new["optimizer"].state[weight]["exp_avg"]
    was = old["model"]["embed"].weight
    wanted = (
        torch.cat([was, before[6:]]),
        torch.cat([old["optimizer"].state[was]["exp_avg"], torch.zeros(3, 4)]),
    )
    found = weight.full_tensor(), moment.full_tensor()
    return moment.placements == weight.placements and all(map(same_bytes, found, wanted))


def test_shards_are_resized(gang: Gang, tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", trained(made(6)))
    assert gang.run(sharded, str(tmp_path / "saved"), world=2) == [True, True]
