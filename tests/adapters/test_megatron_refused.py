"""What is refused of Megatron-Core, which is seen by names alone: tests that do without it."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw


@dataclass
class ShardedTensor:
    """What describes a whole tensor."""

    key: str
    data: torch.Tensor
    replica_id: tuple[int, int, int] = (0, 0, 0)
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    global_shape = local_shape

    @property
    def global_offset(self) -> tuple[int, ...]:
        return (0,) * self.data.ndim


@dataclass
class ShardedTensorFactory:
    """What describes a tensor by what is made of it."""

    key: str
    data: torch.Tensor
    build_fn: Any
    replica_id: tuple[int, int, int] = (0, 0, 0)
    flattened_range: None = None


class MegatronModule(nn.Module):
    def __init__(self, described: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.described = described or (lambda weight: {"weight": ShardedTensor("weight", weight)})

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.described(self.weight)
        return found


class FullyShardedDataParallel(MegatronModule):
    pass


class MegatronOptimizer:
    """One that wraps, or chains others."""

    config = SimpleNamespace()

    def __init__(self, inner: Any = None, **more: Any) -> None:
        if inner is not None:
            self.optimizer = inner
        for key, value in more.items():
            setattr(self, key, value)

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it is not asked")

    load_state_dict = state_dict


class FP32Optimizer(MegatronOptimizer):
    pass


class Unheard(MegatronOptimizer):
    pass


class HybridDeviceOptimizer(optim.SGD):
    pass


MegatronModule.__module__ = "megatron.core.transformer.module"
MegatronOptimizer.__module__ = "megatron.core.optimizer.optimizer"
Wrapper = type("_BaseDataParallel", (MegatronModule,), {})
Wrapper.__module__ = "megatron.core.distributed.data_parallel_base"
FullyShardedDataParallel.__bases__ = (Wrapper,)


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))


def sgd(kind: type[optim.SGD] = optim.SGD) -> optim.SGD:
    return kind([nn.Parameter(torch.ones(2))], lr=0.1)


def copied(weight: torch.Tensor) -> dict[str, Any]:
    def build(key: str, data: torch.Tensor, *_: object) -> list[ShardedTensor]:
        return [ShardedTensor(key, data.t().contiguous())]

    return {"weight": ShardedTensorFactory("weight", weight, build)}


def halved(weight: torch.Tensor) -> dict[str, Any]:
    def build(key: str, data: torch.Tensor, *_: object) -> dict[str, ShardedTensor]:
        return {"first": ShardedTensor(key, data.detach()[:1])}

    return {"weight": ShardedTensorFactory("weight", weight, build)}


def failing(weight: torch.Tensor) -> dict[str, Any]:
    raise RuntimeError("no group")


@pytest.mark.parametrize(
    ("described", "said"),
    [
        (lambda _: {}, r"model\.weight: sharded_state_dict\(\) lacks this parameter"),
        (copied, r"model\.weight: .*returns copies or transposed"),
        (halved, r"model\.weight: .*returns copies or transposed parts"),
        (lambda _: {"weight": object()}, r"model\.weight: .*has a object, which shardwise"),
    ],
)
def test_a_description_that_cannot_be_followed_is_refused(
    tmp_path: Path, described: Any, said: str
) -> None:
    with pytest.raises(sw.StateError, match=said):
        sw.save(tmp_path / "c", {"model": MegatronModule(described)})


def test_what_a_description_raises_says_of_which_key_it_is(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no group") as caught:
        sw.save(tmp_path / "c", {"model": MegatronModule(failing)})
    assert caught.value.__notes__ == ["model: raised by its sharded_state_dict()"]


def test_a_module_that_does_its_own_division_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match="model: FullyShardedDataParallel, which divides"):
        sw.save(tmp_path / "c", {"model": FullyShardedDataParallel()})


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (Unheard(sgd()), "Unheard"),
        (FP32Optimizer(sgd(HybridDeviceOptimizer)), "offloading"),
        (FP32Optimizer(object()), "object, which is not a torch optimizer"),
        (FP32Optimizer(sgd(), ddp_config=SimpleNamespace(use_megatron_fsdp=True)), "Megatron-FSDP"),
        (
            FP32Optimizer(sgd(), config=SimpleNamespace(use_precision_aware_optimizer=True)),
            "precision-aware",
        ),
        (Unheard(chained_optimizers=[FP32Optimizer(sgd())]), "Unheard"),
    ],
)
def test_an_optimizer_of_an_unknown_kind_is_refused(
    tmp_path: Path, optimizer: Any, said: str
) -> None:
    with pytest.raises(sw.StateError, match=f"optimizer: .*{said}.* is not supported"):
        sw.save(tmp_path / "c", {"model": MegatronModule(), "optimizer": optimizer})


def test_a_model_without_the_optimizer_that_has_its_weights_is_refused(tmp_path: Path) -> None:
    model = MegatronModule()
    model.weight.main_param = torch.ones(2, 3)  # type: ignore[attr-defined]
    with pytest.raises(
        sw.StateError, match=r'put the optimizer .* into the state too.*only=\["model\.\*"\]'
    ):
        sw.save(tmp_path / "c", {"model": model})


def test_a_model_whose_weights_are_gathered_later_is_refused(tmp_path: Path) -> None:
    model: Any = MegatronModule()
    model.ddp_config = SimpleNamespace(overlap_param_gather=True)
    with pytest.raises(
        sw.StateError, match="model: an optimizer that is not in the state has more exact"
    ):
        sw.save(tmp_path / "c", {"model": model})


def test_a_divided_model_inside_of_another_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tensor": 1, "pipeline": 1, "expert": 1}
    parallel: Any = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_tensor_model_parallel_world_size=lambda: sizes["tensor"],
        get_pipeline_model_parallel_world_size=lambda: sizes["pipeline"],
        get_expert_model_parallel_world_size=lambda: sizes["expert"],
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", parallel)
    state: Any = {"model": nn.ModuleDict({"inner": MegatronModule()})}
    sw.save(tmp_path / "alone", state)
    for kind in sizes:
        sizes |= {"tensor": 1, "pipeline": 1, "expert": 1, kind: 2}
        with pytest.raises(sw.StateError, match=r"model: .* contains Megatron-Core modules"):
            sw.save(tmp_path / "c", state)
    sw.save(tmp_path / "plain", {"model": nn.Linear(2, 2)})


def test_two_models_in_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match=r"model\.weight: two values .*separate key"):
        sw.save(tmp_path / "c", {"model": [MegatronModule(), MegatronModule()]})


def test_wrappers_of_torch_make_no_difference(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"model": nn.DataParallel(MegatronModule())})
    other = MegatronModule()
    nn.init.zeros_(other.weight)
    sw.load(tmp_path / "c", {"model": other})
    assert torch.equal(other.weight.detach(), MegatronModule().weight.detach())


class Extra(MegatronModule):
    """With extra state of any kind."""

    def __init__(self, kept: object, replica: int = 0) -> None:
        super().__init__(self.describe)
        self.kept = kept
        self.replica = replica

    def describe(self, weight: torch.Tensor) -> dict[str, Any]:
        extra = ShardedObject(
            key="layer._extra_state", data=self.kept, replica_id=(0, self.replica, 0)
        )
        return {"weight": ShardedTensor("weight", weight), "_extra_state": extra}

    def get_extra_state(self) -> object:
        return self.kept

    def set_extra_state(self, state: object) -> None:
        self.kept = state


class ShardedObject(SimpleNamespace):
    global_shape, global_offset = (1,), (0,)


@pytest.mark.parametrize("value", [{"scale": 2.0}, io.BytesIO(b"ab"), torch.tensor([1, 2]).byte()])
def test_extra_state_goes_by_its_name(tmp_path: Path, value: Any) -> None:
    sw.save(tmp_path / "c", {"model": Extra(value)})
    assert "model.layer._extra_state" in sw.open(tmp_path / "c")
    other = {dict: Extra({}), io.BytesIO: Extra(io.BytesIO(b"old"))}.get(type(value))
    other = other or Extra(torch.tensor([0, 1, 2]).byte())
    sw.load(tmp_path / "c", {"model": other})
    plain = [
        each.getvalue() if isinstance(each, io.BytesIO) else each for each in (value, other.kept)
    ]
    assert type(other.kept) is type(value)
    assert torch.equal(*plain) if isinstance(value, torch.Tensor) else plain[0] == plain[1]
    sw.load(tmp_path / "c", {"model": Extra(None)})  # which has no use for it


@pytest.mark.parametrize("value", [None, io.BytesIO(), torch.empty(0, dtype=torch.uint8)])
def test_no_extra_state_is_not_saved(tmp_path: Path, value: Any) -> None:
    sw.save(tmp_path / "c", {"model": Extra(value)})
    sw.save(tmp_path / "of-another", {"model": Extra(b"copy", replica=1)})
    for name in ("c", "of-another"):
        assert list(sw.open(tmp_path / name)) == ["model.weight"]
    sw.load(tmp_path / "c", {"model": Extra(value)})
