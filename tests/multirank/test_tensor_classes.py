"""Sharded tensors of torchao on several ranks, loaded into other shardings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardwise as sw
from tests.breadth import mostly_long
from tests.tensor_classes.tensors import MAKERS, TRAINING, bits, values
from tests.tools.gang import Gang

torchao_optim = pytest.importorskip("torchao.optim", exc_type=ImportError)
SPLIT_BY_COLUMNS = ("int8, one scale", "intx", "int4", "mxfp8", "mxfp4", "nvfp4")
"""Classes with scales for blocks of columns, or one scale."""


def shard(whole: torch.Tensor, dim: int | None) -> DTensor:
    """Cut a quantized tensor as tensor parallelism does: into slices of its inner tensors."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    if dim is None:
        placement, local = Replicate(), whole
    else:
        size = whole.shape[dim] // world
        placement, local = Shard(dim), _cut(whole, dim, rank * size, size)
    # DTensor.from_local needs aten.view, which some classes lack.
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensor(local, DTensorSpec(mesh, (placement,), meta), requires_grad=False)


def _cut(whole: Any, dim: int, start: int, size: int) -> Any:
    """Return a slice, from inner tensors whose sizes divide those of the whole.

    Not all classes of torchao can be sliced along all dimensions, so this does not ask them.
    """
    keys, context = whole.__tensor_flatten__()
    part = dict(context)
    local = list(whole.shape)
    local[dim] = size
    if "shape" in part:
        part["shape"] = torch.Size(local)
    if part.get("block_size") and not isinstance(part["block_size"], int):
        part["block_size"] = [min(n, m) for n, m in zip(part["block_size"], local, strict=True)]
    inner = {}
    for key in keys:
        data = getattr(whole, key)
        at = dim
        if type(whole).__name__ == "Int4Tensor" and key != "qdata":
            at = 1 - dim
        if data.dim() and data.shape[at] > 1:
            n = data.shape[at] * size // whole.shape[dim]
            data = data.narrow(at, start * data.shape[at] // whole.shape[dim], n).contiguous()
        inner[key] = data
    return type(whole).__tensor_unflatten__(inner, part, torch.Size(local), None)


def save_shards(path: str, kind: str, dim: int | None) -> None:
    sw.save(path, {"w": shard(MAKERS[kind](values(0)), dim)})


def load_shards(path: str, kind: str, dim: int | None) -> None:
    whole = MAKERS[kind](values(0))
    live = shard(MAKERS[kind](values(1)), dim)
    sw.load(path, {"w": live})
    assert bits(live) == bits(shard(whole, dim))


CASES = [
    (kind, dim, target, world)
    for kind in MAKERS
    if kind not in TRAINING
    for dim, target, world in [(0, 0, 2), (0, 0, 4), (0, 0, 1), (0, None, 1), (None, 0, 2)]
]


@pytest.mark.parametrize(
    ("kind", "dim", "target", "world"),
    mostly_long(CASES, [case for case in CASES if case[1:] in [(0, 0, 4), (0, None, 1)]]),
)
def test_rows_load_into_other_shardings(
    gang: Gang, tmp_path: Path, kind: str, dim: int | None, target: int | None, world: int
) -> None:
    gang.run(save_shards, str(tmp_path), kind, dim, world=2)
    gang.run(load_shards, str(tmp_path), kind, target, world=world)


@pytest.mark.parametrize(
    ("kind", "world"),
    mostly_long(
        [(kind, n) for kind in MAKERS if kind not in TRAINING for n in (1, 2, 4)],
        [(kind, 4) for kind in ("int4", "int8", "mxfp4", "nvfp4, swizzled")],
    ),
)
def test_columns_load_into_other_shardings_or_are_refused(
    gang: Gang, tmp_path: Path, kind: str, world: int
) -> None:
    """A scale of each row of a shard is not one of a row of the whole, as far as anyone knows."""
    gang.run(save_shards, str(tmp_path), kind, 1, world=2)
    if kind in SPLIT_BY_COLUMNS or world == 2:
        gang.run(load_shards, str(tmp_path), kind, 1, world=world)
        return
    for outcome in gang.run_outcomes(load_shards, str(tmp_path), kind, 1, world=world):
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        assert "w.scale" in str(outcome.exception)


def test_a_border_in_a_block_of_a_live_tensor_is_refused(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_shards, str(tmp_path), "nvfp4, swizzled", None, world=1)
    for outcome in gang.run_outcomes(load_shards, str(tmp_path), "nvfp4, swizzled", 1, world=4):
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        assert "w.scale: this rank's part of the tensor begins or ends" in str(outcome.exception)
        assert "resize" not in str(outcome.exception)


def save_different(path: str, dim: int) -> None:
    live = shard(MAKERS["int8, one scale"](values(0)), dim)
    live._local_tensor.scale.add_(dist.get_rank())
    sw.save(path, {"w": live})


def load_different(path: str, dim: int) -> Any:
    live = shard(MAKERS["int8, one scale"](values(1)), dim)
    sw.load(path, {"w": live})
    expected = shard(MAKERS["int8, one scale"](values(0)), dim)
    expected._local_tensor.scale.add_(dist.get_rank())
    assert bits(live) == bits(expected)


def test_scales_that_differ_between_shards_come_back_to_their_shard(
    gang: Gang, tmp_path: Path
) -> None:
    gang.run(save_different, str(tmp_path), 0, world=2)
    gang.run(load_different, str(tmp_path), 0, world=2)
    for world, dim in [(1, 0), (4, 0), (2, 1)]:
        for outcome in gang.run_outcomes(load_different, str(tmp_path), dim, world=world):
            assert isinstance(outcome.exception, sw.MismatchError), (world, dim, outcome)
            assert "w.scale" in str(outcome.exception)


OPTIMIZERS = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit")


def training(name: str, *, sharded: bool, rows: int, last: int = 64) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, rows), nn.Linear(rows, last, bias=False))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, getattr(torchao_optim, name)(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: Any, at: int) -> None:
    """Step as the optimizer does, but without torch.compile, which would take a minute."""
    generator = torch.Generator().manual_seed(at)
    batch = torch.randn(8, 128, generator=generator)
    model(batch).pow(2).mean().backward()
    [group] = optimizer.param_groups
    for parameter in group["params"]:
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = optimizer._new_buffer(parameter, True)
            state["exp_avg_sq"] = optimizer._new_buffer(parameter, False)
        state["step"] += 1
        with torch.no_grad():
            torchao_optim.adam.single_param_adam(
                parameter.detach(),
                parameter.grad,
                state["step"],
                state["exp_avg"],
                state["exp_avg_sq"],
                None,
                group["lr"],
                *group["betas"],
                group["weight_decay"],
                group["eps"],
                optimizer.is_adamw,
                False,
            )
    optimizer.zero_grad()


def seen(model: nn.Module, optimizer: Any) -> list[Any]:
    found: list[Any] = []
    for parameter in model.parameters():
        found.append(bits(parameter))
        for key, value in sorted(optimizer.state[parameter].items()):
            found.append((key, type(value), bits(value)))
    return found


def resume(path: str, name: str, rows: int) -> None:
    first = training(name, sharded=True, rows=rows)
    for at in range(2):
        step(*first, at)
    sw.save(path, dict(zip(("model", "optimizer"), first, strict=True)))
    fresh = training(name, sharded=True, rows=rows)
    sw.load(path, dict(zip(("model", "optimizer"), fresh, strict=True)))
    assert seen(*fresh) == seen(*first)
    step(*fresh, 7)  # into state that exists
    sw.load(path, dict(zip(("model", "optimizer"), fresh, strict=True)))
    assert seen(*fresh) == seen(*first)
    for at in range(2, 4):
        step(*first, at)
        step(*fresh, at)
    assert seen(*fresh) == seen(*first)


@pytest.mark.parametrize(
    ("name", "rows", "world"),
    mostly_long(
        [(name, rows, n) for name in OPTIMIZERS for rows in (256, 100) for n in (1, 2, 3)],
        [("AdamW8bit", 256, 2), ("AdamW4bit", 100, 2)],
    ),
)
def test_training_continues_as_if_it_had_not_stopped(
    gang: Gang, tmp_path: Path, name: str, rows: int, world: int
) -> None:
    gang.run(resume, str(tmp_path), name, rows, world=world)


def sizes(path: str) -> tuple[int, int]:
    """Save with shardwise and with DCP, and return the bytes of both checkpoints."""
    model, optimizer = training("AdamW8bit", sharded=True, rows=1024)
    step(model, optimizer, 0)
    sw.save(f"{path}/sw", {"model": model, "optimizer": optimizer})
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    torch.distributed.checkpoint.save(state, checkpoint_id=f"{path}/dcp")
    dist.barrier()
    ours, theirs = (
        sum(each.stat().st_size for each in Path(path, name).rglob("*")) for name in ("sw", "dcp")
    )
    return ours, theirs


def test_a_checkpoint_is_not_larger_than_that_of_dcp(gang: Gang, tmp_path: Path) -> None:
    for ours, theirs in gang.run(sizes, str(tmp_path), world=2):
        assert ours <= theirs


def whole_state(path: str, name: str, *, save: bool, rows: int = 256, last: int = 64) -> list[Any]:
    """Return the dequantized state of all parameters, whole."""
    model, optimizer = training(name, sharded=True, rows=rows, last=last)
    state = {"model": model, "optimizer": optimizer}
    if save:
        step(model, optimizer, 0)
        sw.save(path, state)
    else:
        sw.load(path, state)
    found = []
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            value = optimizer.state[parameter][key]
            local = value._local_tensor
            plain = local.dequantize() if hasattr(local, "codes") else local
            whole = DTensor.from_local(
                plain, value.device_mesh, value.placements, shape=value.shape, stride=value.stride()
            )
            found.append(whole.full_tensor().tolist())
    return found


@pytest.mark.parametrize(
    ("name", "worlds"),
    mostly_long(
        [(name, w) for name in OPTIMIZERS for w in [(2, 1), (2, 4), (1, 2), (4, 2), (2, 3)]],
        [("AdamW8bit", (2, 1)), ("AdamW4bit", (2, 4))],
    ),
)
def test_state_is_resharded_bit_for_bit(
    gang: Gang, tmp_path: Path, name: str, worlds: tuple[int, int]
) -> None:
    [saved, *_] = gang.run(whole_state, str(tmp_path), name, save=True, world=worlds[0])
    for loaded in gang.run(whole_state, str(tmp_path), name, save=False, world=worlds[1]):
        assert loaded == saved


def save_rows(path: str, rows: int) -> None:
    model, optimizer = training("AdamW8bit", sharded=True, rows=rows)
    step(model, optimizer, 0)
    sw.save(path, {"model": model, "optimizer": optimizer})


def load_rows(path: str, rows: int) -> None:
    model, optimizer = training("AdamW8bit", sharded=True, rows=rows)
    before = [bits(each) for each in model.parameters()]
    try:
        sw.load(path, {"model": model, "optimizer": optimizer})
    finally:
        assert [bits(each) for each in model.parameters()] == before
        assert not any(optimizer.state.values())


def test_borders_that_cut_blocks_are_refused(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_rows, str(tmp_path), 254, world=1)  # 127 blocks of 256 elements
    for outcome in gang.run_outcomes(load_rows, str(tmp_path), 254, world=2):
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        [problem] = [
            line
            for line in str(outcome.exception).splitlines()
            if "optimizer.0.weight.exp_avg.scale" in line
        ]
        assert "within a block" in problem


def go_on(path: str, *, load: bool) -> list[Any]:
    """Train two steps with a save between them, or load it and train the second; return the end."""
    model, optimizer = training("AdamW8bit", sharded=True, rows=4096, last=2)
    state = {"model": model, "optimizer": optimizer}
    if load:
        sw.load(path, state)
    else:
        step(model, optimizer, 0)
        sw.save(path, state)
        sw.load(path, state)
    step(model, optimizer, 1)
    sw.save(f"{path}-{load}", state)
    found = []
    for parameter in model.parameters():
        found.append(bits(parameter))
        for key in ("exp_avg", "exp_avg_sq"):
            local = optimizer.state[parameter][key]._local_tensor
            found.append(local.dequantize().tolist() if hasattr(local, "codes") else local.tolist())
    return found


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_without_elements_of_a_parameter_keep_no_state_of_it(
    gang: Gang, tmp_path: Path, world: int
) -> None:
    """torchao keeps plain state of an empty shard, and quantized state of the others."""
    path = str(tmp_path / "saved")
    expected = gang.run(go_on, path, load=False, world=world)
    assert gang.run(go_on, path, load=True, world=world) == expected


def go_on_with_one_parameter(path: str) -> None:
    """The last of three ranks has no quantized state at all."""
    found = []
    for load in (False, True):
        torch.manual_seed(0)
        model = nn.Module()
        model.w = nn.Parameter(torch.randn(2, 4096))
        model.forward = lambda batch, model=model: batch @ model.w[:, :128].T
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        state = {"model": model, "optimizer": torchao_optim.AdamW8bit(model.parameters(), lr=1e-2)}
        if load:
            sw.load(path, state)
        else:
            step(model, state["optimizer"], 0)
            sw.save(path, state)
        step(model, state["optimizer"], 1)
        found.append(bits(model.w))
    assert found[0] == found[1]


def test_a_rank_without_quantized_state_saves_nothing_of_it(gang: Gang, tmp_path: Path) -> None:
    gang.run(go_on_with_one_parameter, str(tmp_path), world=3)
    [scale] = {sw.open(tmp_path)["optimizer.w.exp_avg.scale"].shape}
    assert tuple(scale) == (2 * 4096 // 256,)


@pytest.mark.parametrize("worlds", [(2, 3), (3, 1), (4, 3)])
def test_state_is_resharded_to_and_from_ranks_without_elements(
    gang: Gang, tmp_path: Path, worlds: tuple[int, int]
) -> None:
    arguments: Any = {"rows": 4096, "last": 2}
    path, name = str(tmp_path), "AdamW8bit"
    [saved, *_] = gang.run(whole_state, path, name, save=True, **arguments, world=worlds[0])
    for loaded in gang.run(whole_state, path, name, save=False, **arguments, world=worlds[1]):
        assert loaded == saved


def test_ranks_with_plain_and_with_quantized_state_of_a_parameter_are_refused(
    gang: Gang, tmp_path: Path
) -> None:
    """torchao quantizes state of 4,096 elements or more; the last of 3 ranks has 3,840."""
    for outcome in gang.run_outcomes(save_rows, str(tmp_path), 94, world=3):
        assert isinstance(outcome.exception, sw.ShardwiseError), outcome
        assert "optimizer.0.weight.exp_avg.codes" in str(outcome.exception)
    assert not [*tmp_path.glob("**/manifest.json")]
