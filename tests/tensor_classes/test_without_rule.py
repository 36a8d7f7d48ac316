"""Classes of tensors that no rule describes: saved by their inner tensors, where they live."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardwise as sw
from tests.faults.test_damage import rewrite_manifest
from tests.tensor_classes.tensors import Holder, bits


@dataclass
class Config:
    kind: str
    sizes: tuple[int, ...] = (1, 2)


Pair = namedtuple("Pair", "a b")


class Wrapper(torch.Tensor):
    """Wraps two tensors, and keeps any context."""

    @staticmethod
    def __new__(cls, one: torch.Tensor, two: torch.Tensor, context: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=torch.float32)

    def __init__(self, one: torch.Tensor, two: torch.Tensor, context: Any = None) -> None:
        self.one, self.two, self.context = one, two, context

    def __tensor_flatten__(self) -> Any:
        return ["one", "two"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["one"], inner["two"], context)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].one, args[0].two, args[0].context)
        raise NotImplementedError(function)


def wrapper(seed: int, context: Any = None) -> Wrapper:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randint(0, 256, (4, 3), dtype=torch.uint8, generator=generator)
    return Wrapper(one, torch.randn(2, generator=generator), context)


CONTEXTS: dict[str, Any] = {
    "none": None,
    "a dict": {"block": 32, "dtype": torch.bfloat16, "shape": torch.Size((4, 3))},
    "a list": [True, 1.5, "x", (1, 2)],
    "an object": Config("rowwise"),
    "objects in a dict": {"config": Config("rowwise"), "pair": Pair(1, Config("x"))},
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("place", ["item", "module", "nested"])
def test_it_comes_back_where_it_lives(tmp_path: Path, context: str, place: str) -> None:
    def state(seed: int) -> tuple[dict[str, Any], Any]:
        tensor: Any = wrapper(seed, CONTEXTS[context])
        if place == "nested":
            tensor = TwoTensor(tensor, wrapper(seed + 5, CONTEXTS[context]))
        return ({"x": Holder(tensor)} if place == "module" else {"x": tensor}), tensor

    (saved, expected), (live, target) = state(0), state(1)
    sw.save(tmp_path, saved)
    sw.load(tmp_path, live)
    assert bits(target) == bits(expected)


@pytest.mark.parametrize("context", [name for name in CONTEXTS if name != "none"])
def test_another_context_is_refused(tmp_path: Path, context: str) -> None:
    live = wrapper(1, None)
    before = bits(live)
    sw.save(tmp_path, {"x": wrapper(0, CONTEXTS[context])})
    with pytest.raises(sw.MismatchError, match=r"x\.context"):
        sw.load(tmp_path, {"x": live})
    assert bits(live) == before


def test_another_class_is_refused(tmp_path: Path) -> None:
    live = TwoTensor(torch.zeros(4, 3), torch.zeros(4, 3))
    sw.save(tmp_path, {"x": wrapper(0)})
    with pytest.raises(sw.MismatchError, match=r"x\.class: .*Wrapper.* in the checkpoint, .*Two"):
        sw.load(tmp_path, {"x": live})


def test_a_context_with_what_no_value_describes_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match=r"x\.context"):
        sw.save(tmp_path, {"x": wrapper(0, {"function": print})})


class Keeps(torch.optim.SGD):
    """Keeps a tensor of a class that its own module has."""


def keeping(seed: int, *, has_state: bool) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 4, bias=False)
    optimizer = Keeps(module.parameters(), lr=1)
    if has_state:
        optimizer.state[module.weight] = {"x": wrapper(seed, {"block": 3})}
    return {"model": module, "optimizer": optimizer}


@pytest.mark.parametrize("has_state", [True, False])
def test_an_optimizer_of_the_same_module_builds_it(tmp_path: Path, has_state: bool) -> None:
    saved, live = keeping(0, has_state=True), keeping(1, has_state=has_state)
    sw.save(tmp_path, saved)
    sw.load(tmp_path, live)
    expected = saved["optimizer"].state[saved["model"].weight]["x"]
    loaded = live["optimizer"].state[live["model"].weight]["x"]
    assert type(loaded) is Wrapper
    assert bits(loaded) == bits(expected)
    assert loaded.context == {"block": 3}


def test_a_class_that_the_loading_program_does_not_have_is_named(tmp_path: Path) -> None:
    sw.save(tmp_path, keeping(0, has_state=True))
    module = nn.Linear(3, 4, bias=False)
    state = {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1)}
    with pytest.raises(sw.StateError, match=r"optimizer\.weight\.x: .*Wrapper, which has no rule"):
        sw.load(tmp_path, state)
    assert not state["optimizer"].state
    sw.load(tmp_path, state, skip=["optimizer.*"])


HOSTILE: list[dict[str, Any]] = [
    {"class": "os:system"},
    {"class": "torch:Tensor"},
    {"class": 3},
    {"shape": [-1, 3]},
    {"shape": [4, 3, 2]},
    {"shape": "x"},
    {"dtype": "nothing"},
    {"tensors": ["one"]},
    {"tensors": {}},
    {"tensors": {"one": None, "three": None}},
    {"context": {"$": "pickle", "v": "gAQu"}},
]


@pytest.mark.parametrize("change", HOSTILE, ids=str)
def test_a_hostile_description_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    def alter(body: bytes) -> bytes:
        document = json.loads(body.rstrip().rstrip(b",") + b"}")
        [entry] = [each for each in document["objects"] if each["name"] == "optimizer.weight.x"]
        entry["value"] |= change
        return json.dumps(document).encode()[:-1] + b","

    sw.save(tmp_path, keeping(0, has_state=True))
    rewrite_manifest(tmp_path, alter)
    live = keeping(1, has_state=False)
    with pytest.raises(sw.ShardwiseError, match=r"optimizer\.weight\.x"):
        sw.load(tmp_path, live)
    assert not live["optimizer"].state
