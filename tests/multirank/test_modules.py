"""Modules in every state that training leaves them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.breadth import mostly_long
from tests.multirank.models import CPU, VOCABULARY, WORLDS, Block, Model, build, train
from tests.multirank.test_matrix import contents
from tests.tools.gang import Gang

TOKENS = torch.arange(VOCABULARY)


def fresh(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def output(module: nn.Module) -> Tensor:
    """What an evaluation gives; it leaves parameters gathered where a strategy keeps them."""
    with torch.no_grad():
        result: Tensor = module(TOKENS)
    return result.full_tensor() if isinstance(result, DTensor) else result


def fsdp1(model: nn.Module, strategy: str, *, original: bool, **options: Any) -> nn.Module:
    """Blocks and the rest flattened."""
    mesh = init_device_mesh("cpu", (2, 2)) if "HYBRID" in strategy else None
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=original,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=CPU,
        **options,
    )


def load_after_evaluation(strategy: str, original: bool, path: str) -> None:
    """Save under a strategy; load what one process saved, and compute with it."""
    expected = output(fresh(1))
    model = fsdp1(fresh(1), strategy, original=original)
    assert torch.equal(output(model), expected)
    sw.save(f"{path}/sharded", {"model": model}, check_replicas=True)
    other = fsdp1(fresh(2), strategy, original=original)
    assert not torch.equal(output(other), expected)
    sw.load(f"{path}/plain", {"model": other})
    assert torch.equal(output(other), expected)
    sw.load(f"{path}/plain", {"model": fsdp1(fresh(3), strategy, original=original)})


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@pytest.mark.parametrize(
    ("strategy", "original"),
    mostly_long(
        [(strategy, original) for strategy in STRATEGIES for original in (True, False)],
        [*((strategy, True) for strategy in STRATEGIES), ("FULL_SHARD", False)],
    ),
)
def test_every_strategy_of_fsdp1(gang: Gang, tmp_path: Path, strategy: str, original: bool) -> None:
    sw.save(tmp_path / "plain", {"model": fresh(1)})
    gang.run(load_after_evaluation, strategy, original, str(tmp_path), world=4)
    loaded = fresh(2)
    sw.load(tmp_path / "sharded", {"model": loaded})
    for (name, got), want in zip(
        loaded.state_dict().items(), fresh(1).state_dict().values(), strict=True
    ):
        assert torch.equal(got, want), name


def load_after_evaluation_of_each(path: str, kinds: list[str]) -> None:
    """The same for other parallelisms."""
    for kind in kinds:
        model = build(kind, 2)["model"]
        before = output(model)
        sw.load(path, {"model": model})
        after = output(model)
        assert not torch.equal(before, after), kind
        torch.testing.assert_close(after, output(fresh(1)))
        sw.save(f"{path}-{kind}", {"model": model})


@pytest.mark.parametrize("world", [2, 4])
def test_a_load_after_an_evaluation_is_seen_by_the_next(
    gang: Gang, tmp_path: Path, world: int
) -> None:
    path = tmp_path / "plain"
    sw.save(path, {"model": fresh(1)})
    kinds = [
        k for k, n in WORLDS.items() if n == world and "pipeline" not in k and k != "interleaved"
    ]
    gang.run(load_after_evaluation_of_each, str(path), kinds, world=world)
    for kind in kinds:
        loaded = fresh(2)
        sw.load(f"{path}-{kind}", {"model": loaded})
        assert torch.equal(output(loaded), output(fresh(1)))


def load_onto_meta(source: str, root: str, kind: str) -> None:
    """A model without memory is given it as it is filled; its optimizer keeps hold of it."""
    with torch.device("meta"):
        state = build(kind, 2)
    sw.load(source, state)
    sw.save(f"{root}/{kind}", state)
    train(state)
    sw.save(f"{root}/{kind}-trained", state)


ON_META = [kind for kind in WORLDS if not kind.startswith(("ddp", "fsdp1"))]


@pytest.mark.parametrize("kind", mostly_long(ON_META, ["plain", "fsdp2", "pipeline_fsdp"]))
def test_modules_on_the_meta_device_get_memory(gang: Gang, tmp_path: Path, kind: str) -> None:
    state = build("plain", 1)
    train(state)
    sw.save(tmp_path / "source", state)
    train(state)
    sw.save(tmp_path / "trained", state)
    gang.run(load_onto_meta, str(tmp_path / "source"), str(tmp_path), kind, world=WORLDS[kind])
    assert contents(tmp_path / kind) == contents(tmp_path / "source")
    assert contents(tmp_path / f"{kind}-trained") == contents(tmp_path / "trained")


class Tied(nn.Module):
    """Two names for one weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.norm.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.embed(x)))
        return out


def tied(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with torch.device("meta" if kind == "meta" else "cpu"):
        model: nn.Module = Tied()
    if kind == "fsdp1_flat":  # it cannot mix frozen parameters and others
        model.requires_grad_(True)
    if kind.startswith("fsdp1"):
        return FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1", device_id=CPU)
    return nn.parallel.DistributedDataParallel(model) if kind == "ddp" else fully_shard(model)


def load_tied(path: str, kind: str) -> None:
    sw.load(f"{path}/plain", {"model": (model := tied(kind, 2))})
    report = sw.save(f"{path}/again", {"model": model}, check_replicas=True)
    assert report.bytes_total == 4 * (5 * 4 + 5 + 4 * 4) + 8
    if isinstance(model, Tied):
        assert model.head.weight is model.embed.weight
        assert not model.norm.weight.requires_grad


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp1_flat", "fsdp2", "meta"])
def test_tied_weights_stay_tied(gang: Gang, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    sw.save(tmp_path / "plain", {"model": Tied()})
    gang.run(load_tied, str(tmp_path), kind, world=2)
    assert contents(tmp_path / "again") == contents(tmp_path / "plain")


class Adapted(nn.Module):
    """A frozen base and a small adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.lora = nn.ModuleDict({"a": nn.Linear(6, 2), "b": nn.Linear(2, 5)})


def load_base_then_adapter(path: str) -> None:
    """Each from a checkpoint of its own; of either only the bytes of this rank's part are read."""
    torch.manual_seed(7)
    model = fully_shard(Adapted())
    torch.manual_seed(7)
    fresh = fully_shard(Adapted())
    with pytest.raises(sw.MismatchError, match="lora"):
        sw.load(f"{path}/base", {"model": model})
    for mine, untouched in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine.to_local(), untouched.to_local())
    sw.load(f"{path}/base", {"model": model}, only=["model.base.*"])
    report = sw.load(f"{path}/adapter", {"model": model}, skip=["model.base.*"])
    assert report.bytes_needed < 4 * (12 + 2 + 10 + 5)
    sw.save(f"{path}/all", {"model": model})


def test_a_base_and_an_adapter_come_from_two_checkpoints(gang: Gang, tmp_path: Path) -> None:
    model = Adapted()
    sw.save(tmp_path / "base", {"model": {"base": model.base}})
    sw.save(tmp_path / "adapter", {"model": {"lora": model.lora}})
    gang.run(load_base_then_adapter, str(tmp_path), world=2)
    read = sw.open(tmp_path / "all").tensors()
    for name, value in model.state_dict().items():
        assert torch.equal(read[f"model.{name}"][...], value), name


def load_as_half(path: str) -> None:
    model = fully_shard(fresh(2).to(torch.bfloat16))
    with pytest.raises(sw.MismatchError, match="bfloat16"):
        sw.load(path, {"model": model})
    sw.load(path, {"model": model}, cast=True)
    sw.save(f"{path}-half", {"model": model})


def test_dtypes_are_converted_as_shards_are_read(gang: Gang, tmp_path: Path) -> None:
    sw.save(tmp_path / "full", {"model": fresh(1)})
    gang.run(load_as_half, str(tmp_path / "full"), world=4)
    read = sw.open(tmp_path / "full-half").tensors()
    for name, value in fresh(1).to(torch.bfloat16).state_dict().items():
        assert torch.equal(read[f"model.{name}"][...], value), name


def save_wrapped(root: str) -> None:
    """Activation checkpointing and compilation, inside and outside of sharding."""
    outside = fully_shard(checkpoint_wrapper(Adapted()))
    inside = Adapted()
    inside.base = checkpoint_wrapper(inside.base)
    inside.lora["a"] = torch.compile(inside.lora["a"])
    wrapped = {
        "fsdp2": torch.compile(outside),
        "fsdp1": FullyShardedDataParallel(inside, use_orig_params=True, device_id=CPU),
        "ddp": torch.compile(nn.parallel.DistributedDataParallel(checkpoint_wrapper(fresh(1)))),
    }
    for key, model in wrapped.items():
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        sw.save(f"{root}/{key}", {"model": model, "optimizer": optimizer})
        sw.load(f"{root}/{key}", {"model": model, "optimizer": optimizer})


def test_wrappers_leave_no_traces_in_names(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_wrapped, str(tmp_path), world=2)
    for key, model in {"fsdp2": Adapted(), "fsdp1": Adapted(), "ddp": fresh(1)}.items():
        expected = {f"model.{name}" for name in model.state_dict()}
        checkpoint = sw.open(tmp_path / key)
        assert set(checkpoint.tensors()) == expected
        groups = checkpoint["optimizer.param_groups"]
        assert isinstance(groups, list)
        members = {f"model.{name}" for name, _ in model.named_parameters()}
        assert {f"model.{member}" for member in groups[0]["members"]} == members


def save_mixed(path: str) -> None:
    """Kept in float32, computed in bfloat16."""
    low = torch.bfloat16
    models = {
        "fsdp1": fsdp1(fresh(1), "FULL_SHARD", original=True, mixed_precision=MixedPrecision(low)),
        "fsdp2": fully_shard(fresh(1), mp_policy=MixedPrecisionPolicy(param_dtype=low)),
    }
    for key, model in models.items():
        output(model)
        sw.save(f"{path}/{key}", {"model": model})


def test_mixed_precision_saves_what_is_kept(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_mixed, str(tmp_path), world=2)
    sw.save(tmp_path / "plain", {"model": fresh(1)})
    assert contents(tmp_path / "fsdp1") == contents(tmp_path / "plain")
    assert contents(tmp_path / "fsdp2") == contents(tmp_path / "plain")


def average(path: str, kind: str) -> None:
    """A moving average of a model that is wrapped, or sharded as it is; loaded after one more."""
    model: nn.Module = fresh(1)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    ema = torch.optim.swa_utils.AveragedModel(model)
    if kind == "fsdp2":
        fully_shard(model)
        fully_shard(ema.module)

    def update() -> None:
        for parameter in model.parameters():
            parameter.data.mul_(3)
        ema.update_parameters(model)

    update()
    update()
    sw.save(path, {"ema": ema}, check_replicas=True)
    expected = {name: value.clone() for name, value in ema.state_dict().items()}
    update()
    sw.load(path, {"ema": ema})
    for name, value in ema.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_moving_average_of_a_wrapped_model(gang: Gang, tmp_path: Path, kind: str) -> None:
    gang.run(average, str(tmp_path), kind, world=2)
    ema = torch.optim.swa_utils.AveragedModel(fresh(1))
    for factor in (3, 9):
        model = fresh(1)
        for parameter in model.parameters():
            parameter.data.mul_(factor)
        ema.update_parameters(model)
    loaded = torch.optim.swa_utils.AveragedModel(fresh(2))
    sw.load(tmp_path, {"ema": loaded})
    for (name, got), want in zip(
        loaded.state_dict().items(), ema.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got, want, msg=name)
