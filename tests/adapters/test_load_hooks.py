"""Code of the user that runs at load_state_dict() runs at a load, after the tensors are filled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from tests.tools.gang import Gang


class Cached(nn.Linear):
    """Has a buffer that is not saved, and is computed from the weight."""

    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("cache", torch.full((3,), -1.0), persistent=False)
        self.calls: list[str] = []

    def compute(self, call: str) -> None:
        self.calls.append(call)
        weight: Any = self.weight.detach()
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.cache.copy_(whole.sum(1))


class Overriding(Cached):
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, *args: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        assert metadata["version"] == 1  # not that of an old file
        self.compute("override")


class Root(Cached):
    def load_state_dict(self, state_dict: Any) -> Any:  # type: ignore[override]
        result = super().load_state_dict(state_dict)
        self.compute("root")
        return result


class Taking(Cached):
    """Takes its entry out of the dict, as modules do that load it themselves."""

    def __init__(self) -> None:
        super().__init__()
        register: Any = self._register_load_state_dict_pre_hook
        register(self._take)

    def _take(self, state_dict: Any, prefix: str, *_: Any) -> None:
        self.weight.data.copy_(state_dict.pop(f"{prefix}weight"))
        self.compute("taken")


def with_post_hook() -> Cached:
    made = Cached()
    register: Any = made.register_load_state_dict_post_hook
    register(lambda module, keys: module.compute("post"))
    return made


def with_pre_hook() -> Cached:
    made = Cached()

    def hook(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        module.cache.copy_(state_dict[f"{prefix}weight"].sum(1))
        module.calls.append("pre")

    register: Any = made.register_load_state_dict_pre_hook
    register(hook)
    return made


class WithExtraState(Cached):
    """Its hook sees the extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = 1.0
        register: Any = self.register_load_state_dict_post_hook
        register(self._after)

    @staticmethod
    def _after(module: Any, keys: Any) -> None:
        assert not keys.unexpected_keys
        module.compute("post")
        module.cache.mul_(module.extra)

    def get_extra_state(self) -> Any:
        return {"extra": self.extra, "tensor": torch.full((2,), self.extra)}

    def set_extra_state(self, state: Any) -> None:
        assert float(state["tensor"][1]) == state["extra"]
        self.extra = state["extra"]
        self.calls.append("extra")


MAKERS: dict[str, Callable[[], Cached]] = {
    "post hook": with_post_hook,
    "pre hook": with_pre_hook,
    "override": Overriding,
    "override of the root": Root,
    "taken by a pre hook": Taking,
    "extra state": WithExtraState,
}


@pytest.mark.parametrize("kind", ["module", "inner", "list", "compiled", "trainable"])
@pytest.mark.parametrize("name", MAKERS)
def test_it_runs_once(tmp_path: Path, name: str, kind: str) -> None:
    def make() -> tuple[Any, Any]:
        made = MAKERS[name]()
        module: Any = made
        if kind == "inner" and name != "override of the root":
            module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(made))
        wrappers: dict[str, Any] = {"compiled": torch.compile, "list": lambda m: [m]}
        return made, wrappers.get(kind, lambda m: m)(module)

    (saved, whole), (fresh, target) = make(), make()
    if isinstance(saved, WithExtraState):
        saved.extra = 2.0
    if kind == "compiled" and name == "override of the root":
        pytest.skip("load_state_dict() of a compiled module does not call that of the module in it")
    wrap: Any = sw.trainable if kind == "trainable" else lambda module: module
    sw.save(tmp_path, {"model": wrap(whole), "value": 1})
    sw.load(tmp_path, {"model": wrap(target), "value": 0})
    assert torch.equal(fresh.weight, saved.weight)
    scale = 2 if isinstance(saved, WithExtraState) else 1
    assert torch.equal(fresh.cache, saved.weight.detach().sum(1) * scale)
    assert len(fresh.calls) == scale
    fresh.calls.clear()
    sw.load(tmp_path, {"model": wrap(target), "value": 0}, only=["value"])
    assert not fresh.calls


def test_errors_of_hooks_name_the_module(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    sw.save(tmp_path, {"model": module})

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    register: Any = module.register_load_state_dict_post_hook
    register(fail)
    with pytest.raises(KeyError, match="mine") as caught:
        sw.load(tmp_path, {"model": module})
    assert "model: raised by its load_state_dict()" in str(caught.value.__notes__)


def shard(place: str, kind: str) -> None:
    wrap: Any = {
        "ddp": DistributedDataParallel,
        "fsdp2": fully_shard,
        "fsdp1": lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu")),
        "fsdp1, original": lambda m: FullyShardedDataParallel(
            m, use_orig_params=True, device_id=torch.device("cpu")
        ),
    }[kind]

    def make(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        made = WithExtraState()
        return made, wrap(nn.Sequential(made))

    (saved, whole), (fresh, target) = make(1), make(2)
    saved.extra = 3.0
    sw.save(place, {"model": whole})
    fresh.compute = lambda call: fresh.calls.append(call)
    fresh.cache.fill_(1)
    sw.load(place, {"model": target})
    assert fresh.extra == 3
    assert fresh.calls == ["extra", "post"]
    assert fresh.cache.tolist() == [3, 3, 3]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1", "fsdp1, original"])
def test_under_sharding(tmp_path: Path, gang: Gang, kind: str) -> None:
    gang.run(shard, str(tmp_path), kind, world=2)


class Extra(nn.Linear):
    """Has any extra state."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra.clone() if isinstance(self.extra, torch.Tensor) else self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


VALUES: list[Any] = [
    None, torch.zeros(0), torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16), {"n": 1},
    torch.tensor(4.0), {"t": torch.arange(5), "deep": [torch.ones(1)]}, 7, "text",
]  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda m: m, torch.compile, checkpoint_wrapper])
@pytest.mark.parametrize("value", VALUES[1:], ids=repr)
def test_extra_state_takes_any_form(tmp_path: Path, value: Any, wrap: Any) -> None:
    saved = Extra(value)
    sw.save(tmp_path, {"model": nn.Sequential(wrap(saved))})
    assert "model.0._extra_state" in sw.open(tmp_path)
    for current in VALUES:
        fresh = Extra(current)
        sw.load(tmp_path, {"model": nn.Sequential(wrap(fresh))})
        assert repr(fresh.extra) == repr(value)
        assert torch.equal(fresh.weight, saved.weight)
    kept = Extra("kept")
    sw.load(tmp_path, {"model": nn.Sequential(wrap(kept))}, skip=["*._extra_state"])
    assert kept.extra == "kept"


@pytest.mark.parametrize("value", VALUES[1:], ids=repr)
def test_a_module_without_extra_state(tmp_path: Path, value: Any) -> None:
    sw.save(tmp_path, {"model": nn.Sequential(Extra(value))})
    plain = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(sw.MismatchError, match=r"model\.0\._extra_state: in the checkpoint only"):
        sw.load(tmp_path, {"model": plain})
    for options in ({"strict": False}, {"skip": ["*._extra_state"]}):
        report = sw.load(tmp_path, {"model": plain}, **options)
        assert len(report.unexpected) == ("strict" in options)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module"):
            setattr(self, name, nn.Linear(2, 2, bias=False))


def test_children_with_the_names_of_wrappers_parts(tmp_path: Path) -> None:
    wrappers: list[Any] = [lambda m: m, torch.compile]
    for index, wrap in enumerate(wrappers):
        saved, fresh = Child(), Child()
        sw.save(tmp_path / str(index), {"model": wrap(saved)})
        assert "model._orig_mod.weight" in sw.open(tmp_path / str(index))
        sw.load(tmp_path / str(index), {"model": fresh})
        for a, b in zip(saved.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(a, b)
