"""Quantized layers of bitsandbytes: the same packed bytes, and the same values when dequantized."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardwise as sw
from tests.tools.gang import Gang

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed (frameworks)",
)


def bnb() -> Any:
    """The package, which takes three seconds to import."""
    return importlib.import_module("bitsandbytes")


def four_bit(**options: Any) -> Callable[[], nn.Module]:
    return lambda: bnb().nn.Linear4bit(128, 64, compute_dtype=torch.float32, **options)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    f"{kind}{', nested' if nested else ''}, {str(storage).removeprefix('torch.')}": four_bit(
        quant_type=kind, compress_statistics=nested, quant_storage=storage
    )
    for kind in ("nf4", "fp4")
    for nested in (True, False)
    for storage in (torch.uint8, torch.bfloat16)
} | {"int8": lambda: bnb().nn.Linear8bitLt(128, 64, has_fp16_weights=False, threshold=6.0)}


class Model(nn.Module):
    """A quantized base with an adapter, as in QLoRA."""

    def __init__(self, make: Callable[[], nn.Module], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = make(), make()
        self.adapter = nn.Linear(128, 64)
        for layer in (self.first, self.second):
            layer.weight.data *= torch.rand(64, 1) * 10**seed
        self.to("cpu")  # quantizes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.first(inputs) + self.second(inputs) + self.adapter(inputs)
        return result


def dequantized(layer: Any) -> torch.Tensor:
    if isinstance(layer, bnb().nn.Linear8bitLt):
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return bnb().functional.int8_vectorwise_dequant(layer.weight.data, scales)
    return bnb().functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def assert_same(saved: nn.Module, loaded: nn.Module) -> None:
    before, after = saved.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    for name in ("first", "second"):
        a, b = (getattr(model, name) for model in (saved, loaded))
        assert torch.equal(dequantized(a), dequantized(b)), name
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        assert torch.equal(saved(inputs), loaded(inputs))


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_quantized_base_comes_back(tmp_path: Path, kind: str, used: bool) -> None:
    saved, fresh = (Model(MAKERS[kind], seed) for seed in (1, 2))
    if used:
        for model in (saved, fresh):
            model(torch.randn(3, 128))
    sw.save(tmp_path, {"model": saved})
    parameters = [id(parameter) for parameter in fresh.parameters()]
    sw.load(tmp_path, {"model": fresh})
    assert_same(saved, fresh)
    assert parameters == [id(parameter) for parameter in fresh.parameters()]
    first = fresh.first
    if isinstance(first, bnb().nn.Linear4bit):
        assert first.quant_state is first.weight.quant_state


def sharded(kind: str, seed: int) -> Any:
    make = four_bit(quant_type="nf4", quant_storage=torch.float32)
    model = Model(make, seed)
    for layer in (model.first, model.second):
        layer.requires_grad_(False)
    if kind == "FSDP1":
        return FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=None
        )
    return fully_shard(model)


def save_and_load_sharded(place: str, kind: str) -> None:
    saved, fresh = sharded(kind, 1), sharded(kind, 2)
    inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        expected = saved(inputs)
        assert not torch.equal(fresh(inputs), expected)
        sw.save(place, {"model": saved})
        sw.load(place, {"model": fresh})
        assert torch.equal(fresh(inputs), expected)


@pytest.mark.parametrize("kind", ["FSDP1", "FSDP2"])
def test_a_sharded_base_comes_back(tmp_path: Path, gang: Gang, kind: str) -> None:
    gang.run(save_and_load_sharded, str(tmp_path), kind, world=2)
    whole = Model(four_bit(quant_type="nf4", quant_storage=torch.float32), 3)
    sw.load(tmp_path, {"model": whole})
    assert_same(Model(four_bit(quant_type="nf4", quant_storage=torch.float32), 1), whole)


def test_adapters_train_on_after_a_restore(tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(3, 128, generator=torch.Generator().manual_seed(step))
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    saved, fresh = (Model(MAKERS["nf4, nested, uint8"], seed) for seed in (1, 2))
    optimizers = [torch.optim.AdamW(each.adapter.parameters()) for each in (saved, fresh)]
    train(saved, optimizers[0], range(3))
    sw.save(tmp_path, {"model": saved, "optimizer": optimizers[0]})
    train(saved, optimizers[0], range(3, 6))
    sw.load(tmp_path, {"model": fresh, "optimizer": optimizers[1]})
    train(fresh, optimizers[1], range(3, 6))
    assert_same(saved, fresh)


@pytest.mark.parametrize("kind", ["nf4, nested, uint8", "int8"])
def test_a_target_that_is_not_quantized_is_refused(tmp_path: Path, kind: str) -> None:
    sw.save(tmp_path, {"model": Model(MAKERS[kind], 1).first})
    target = MAKERS[kind]()
    before = target.weight.clone()
    with pytest.raises(sw.MismatchError, match=r"model\.weight") as caught:
        sw.load(tmp_path, {"model": target})
    if kind != "int8":
        assert "move the module to its device before loading" in str(caught.value)
    assert torch.equal(target.weight, before)


@pytest.mark.parametrize("other", ["fp4, nested, uint8", "nf4, uint8", "int8"])
def test_another_quantization_is_refused(tmp_path: Path, other: str) -> None:
    sw.save(tmp_path, {"model": Model(MAKERS["nf4, nested, uint8"], 1)})
    target = Model(MAKERS[other], 2)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(sw.MismatchError, match=r"model\.first\.weight"):
        sw.load(tmp_path, {"model": target})
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])
