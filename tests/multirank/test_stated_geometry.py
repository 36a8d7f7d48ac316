"""Tensors that state which boxes of a global tensor they hold, by attributes or by methods."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from shardwise.integrations import dcp
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch
from tests.tools.gang import Gang

SHAPE = (7, 3)
ROWS = ((0, 3), (3, 3), (3, 7))  # of three ranks; the second one has none


def whole() -> torch.Tensor:
    return torch.arange(21, dtype=torch.float32).reshape(SHAPE)


def state_geometry(tensor: torch.Tensor, *shards: tuple[Any, Any, Any], shape: Any = SHAPE) -> Any:
    """Let a tensor state shards: pairs of a global offset, a local offset and a size."""
    columns = [tuple(column) for column in zip(*shards, strict=True)] or [(), (), ()]
    stated: Any = tensor
    stated.global_shape = shape
    stated.global_offsets, stated.local_offsets, stated.local_sizes = columns
    return stated


def padded_rows(rank: int, fill: torch.Tensor | None = None) -> Any:
    """Return some rows of the tensor, inside of a larger local tensor."""
    low, high = ROWS[rank]
    local = torch.full((5, 4), -1.0)
    if fill is not None:
        local[1 : 1 + high - low, 1:] = fill[low:high]
    shards = [((low, 0), (1, 1), (high - low, 3))] if high > low else []
    return state_geometry(local, *shards)


def columns(rank: int, fill: torch.Tensor | None = None) -> Any:
    """Return two column boxes on rank 0 and one on rank 2, in another order in memory."""
    local = torch.full((7, 2), -1.0)
    if fill is not None and rank == 0:
        local[:, 0], local[:, 1] = fill[:, 2], fill[:, 0]
    if fill is not None and rank == 2:
        local[:, 0] = fill[:, 1]
    if rank == 0:
        return state_geometry(local, ((0, 2), (0, 0), (7, 1)), ((0, 0), (0, 1), (7, 1)))
    return state_geometry(local, *([((0, 1), (0, 0), (7, 1))] if rank == 2 else []))


def merged(rank: int, fill: torch.Tensor | None = None) -> Any:
    """Return rows whose two dimensions are merged into one."""
    low, high = ROWS[rank]
    local = torch.full((2 + 3 * (high - low),), -1.0)
    if fill is not None:
        local[2:] = fill[low:high].reshape(-1)
    return state_geometry(local, ((low, 0), (2,), (high - low, 3)))


KINDS = [padded_rows, columns, merged]


def save_and_load(group: ThreadGroup, path: str, save: Any, load: Any) -> None:
    source, target = save(group.rank, whole()), load(group.rank)
    sw.save(path, {"t": source}, group=group)
    sw.load(path, {"t": target}, group=group)
    assert torch.equal(target, load(group.rank, whole()))
    plain = torch.zeros(SHAPE)
    sw.load(path, {"t": plain}, group=group)
    assert torch.equal(plain, whole())


@pytest.mark.parametrize("load", KINDS)
@pytest.mark.parametrize("save", KINDS)
def test_a_tensor_holds_what_it_states(tmp_path: Path, save: Any, load: Any) -> None:
    run_ranks(3, lambda group: save_and_load(group, str(tmp_path), save, load))
    saved = sw.open(tmp_path)["t"]
    assert isinstance(saved, sw.SavedTensor)
    assert torch.equal(saved.tensor(), whole())


class Rows(nn.Module):
    """A module whose parameter and buffer state which rows of a global tensor they hold."""

    def __init__(self, rank: int, fill: torch.Tensor | None = None, device: str = "cpu") -> None:
        super().__init__()
        local = padded_rows(rank, fill)
        self.weight = nn.Parameter(local.clone().to(device))
        self.register_buffer("buffer", local.clone().to(device))
        for tensor in (self.weight, self.buffer):
            vars(tensor).update(vars(local))


class Holder:
    """A Stateful with a tensor of its own."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.tensor, 1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["deep"][0] is self.tensor


def a_run(rank: int, device: str = "cpu", *, stepped: bool) -> dict[str, Any]:
    module = Rows(rank, whole() if stepped else None, device)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    if stepped:
        module.weight.grad = module.weight.detach() + 1
        optimizer.step()
    holder = Holder(padded_rows(rank, whole() if stepped else None))
    return {"module": module, "optimizer": optimizer, "holder": holder}


def resume(group: ThreadGroup, path: str, device: str) -> None:
    expected = a_run(group.rank, stepped=True)
    sw.save(path, expected, group=group)
    found = a_run(group.rank, device, stepped=False)
    sw.load(path, found, group=group)
    low, high = ROWS[group.rank]
    held = slice(1, 1 + high - low), slice(1, None)
    pairs = [(found["holder"].tensor, expected["holder"].tensor)]
    pairs += [(found["module"].weight, expected["module"].weight)]
    pairs += [(found["module"].buffer, expected["module"].buffer)]
    a, b = (next(iter(each["optimizer"].state.values())) for each in (found, expected))
    pairs += [(a[key], b[key]) for key in ("exp_avg", "exp_avg_sq")]
    for got, wanted in pairs:
        assert got.shape == wanted.shape
        assert torch.equal(got[held], wanted[held])
    assert a["step"] == b["step"]
    found["module"].weight.grad = torch.ones(5, 4)
    found["optimizer"].step()
    sw.save(f"{path}/again", found, group=group)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_run_whose_parameters_state_their_rows(tmp_path: Path, device: str) -> None:
    run_ranks(3, lambda group: resume(group, str(tmp_path), device))
    opened = sw.open(tmp_path)
    first = torch.optim.Adam([nn.Parameter(whole())], lr=0.5)
    (parameter,) = first.param_groups[0]["params"]
    parameter.grad = whole() + 1
    first.step()
    for name, wanted in [
        ("module.weight", parameter),
        ("module.buffer", whole()),
        ("optimizer.weight.exp_avg", first.state[parameter]["exp_avg"]),
        ("holder.deep.0", whole()),
    ]:
        saved = opened[name]
        assert isinstance(saved, sw.SavedTensor)
        assert torch.equal(saved.tensor(), wanted.detach()), name


def refused(tensor: torch.Tensor, path: Path, world: int = 1) -> str:
    """Return the error of a save, which is that of a load, too."""
    sw.save(path / "whole", {"t": whole()})

    def save_or_load(group: ThreadGroup, *, load: bool) -> None:
        mine = copy.deepcopy(tensor)
        if load:
            sw.load(path / "whole", {"t": mine}, group=group)
        else:
            sw.save(path / "refused", {"t": mine}, group=group)

    outcomes = run_ranks_and_catch(world, partial(save_or_load, load=False))
    assert all(isinstance(each, sw.LayoutError) for each in outcomes), outcomes
    assert not (path / "refused" / "manifest.json").exists()
    return str(outcomes[0])


ONE = ((0, 0), (0, 0), (7, 3))
CONTRADICTIONS: list[tuple[Any, Any, str]] = [
    ({"shape": (6, 3)}, [ONE], "outside of the global tensor"),
    ({"shape": (7, 3, 1)}, [ONE], "the global tensor has the shape"),
    ({"shape": (7.0, 3)}, [ONE], "global_shape has"),
    ({"shape": "73"}, [ONE], "global_shape has"),
    ({"shape": (True, 3)}, [ONE], "global_shape has"),
    ({}, [((1, 0), (0, 0), (7, 3))], "outside of the global tensor"),
    ({}, [((-1, 0), (0, 0), (7, 3))], "integers of at least 0"),
    ({}, [((0, 0), (1, 0), (7, 3))], "outside of the local tensor"),
    ({}, [((0, 0), (0, 0), (8, 3))], "outside of"),
    ({}, [((0,), (0, 0), (7, 3))], "a shard has the offset"),
    ({}, [((0, 0), (0,), (7, 3))], "a shard has the offset"),
    ({}, [((0, 0), (0, 0), (21,))], "a shard has the offset"),
    ({}, [(0, 0, 7)], "global_offsets has 0"),
    ({}, [ONE, ONE], "overlap in the global tensor"),
    ({}, [((0, 0), (0, 0), (4, 3)), ((3, 0), (4, 0), (3, 3))], "overlap in the global tensor"),
    ({}, [((0, 0), (0, 0), (4, 3)), ((4, 0), (3, 0), (3, 3))], "overlap in the local tensor"),
    ({}, [((0, 0), (0, 0), (6, 3))], "leave gaps"),
]


@pytest.mark.parametrize(("options", "shards", "said"), CONTRADICTIONS)
def test_contradictions_are_refused_by_name(
    tmp_path: Path, options: Any, shards: Any, said: str
) -> None:
    message = refused(state_geometry(whole(), *shards, **options), tmp_path)
    assert said in message
    assert "t: " in message or "- t [7, 3]" in message


@pytest.mark.parametrize("lacking", ["global_shape", "local_offsets", "global_offsets"])
def test_a_geometry_that_is_not_complete_is_refused(tmp_path: Path, lacking: str) -> None:
    tensor = state_geometry(whole(), ONE)
    delattr(tensor, lacking)
    assert f"but not {lacking}" in refused(tensor, tmp_path)


@pytest.mark.parametrize("attribute", ["global_offsets", "local_sizes"])
@pytest.mark.parametrize("value", [5, "ab", {}, ((0, 0), (0, 0))])
def test_columns_of_other_types_or_lengths_are_refused(
    tmp_path: Path, attribute: str, value: Any
) -> None:
    tensor = state_geometry(whole(), ONE)
    setattr(tensor, attribute, value)
    assert "contradicts itself" in refused(tensor, tmp_path)


def test_parts_that_ranks_hold_alike_are_replicas_and_others_must_fit(tmp_path: Path) -> None:
    run_ranks(2, lambda g: sw.save(tmp_path, {"t": state_geometry(whole(), ONE)}, group=g))
    saved = sw.open(tmp_path)["t"]
    assert isinstance(saved, sw.SavedTensor)
    assert torch.equal(saved.tensor(), whole())
    half = state_geometry(whole()[:4], ((0, 0), (0, 0), (4, 3)))
    assert "leave gaps" in refused(half, tmp_path, world=2)


def test_a_part_inside_of_a_per_rank_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match="mine: a Tensor cannot be part of this value, because"):
        sw.save(tmp_path, {"mine": sw.PerRank(state_geometry(whole(), ONE))})


def test_a_scalar_and_an_empty_tensor(tmp_path: Path) -> None:
    scalar = state_geometry(torch.tensor(2.0), ((), (), ()), shape=())
    empty = state_geometry(torch.ones(4), shape=(0, 3))
    sw.save(tmp_path, {"scalar": scalar, "empty": empty})
    opened = sw.open(tmp_path)
    assert float(opened["scalar"].tensor()) == 2  # type: ignore[union-attr]
    assert opened["empty"].shape == (0, 3)  # type: ignore[union-attr]


def set_chunk(local: torch.Tensor, offset: tuple[int, ...], written: Any = None) -> None:
    """Let the local tensor of a DTensor describe its shard as Megatron-FSDP does."""
    chunk = ChunkStorageMetadata(torch.Size(offset), local.size())
    item_chunk = chunk if written is None else ChunkStorageMetadata(*map(torch.Size, written))

    def create_write_items(name: str, tensor: torch.Tensor) -> list[WriteItem]:
        if not local.numel():
            return []
        properties = TensorProperties.create_from_tensor(local)
        data = TensorWriteData(item_chunk, properties, tensor.size())
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=data)]

    described: Any = local
    described.__create_chunk_list__ = lambda: [chunk]
    described.__create_write_items__ = create_write_items


UNEVEN = [0, 5, 5, 7, 7]  # rows of four ranks


def uneven(fill: torch.Tensor | None = None) -> DTensor:
    """Return a DTensor with other shards than those of torch, stated by its local tensor."""
    rank = dist.get_rank()
    low, high = UNEVEN[rank : rank + 2]
    local = torch.full((high - low, 3), -1.0) if fill is None else fill[low:high].clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(SHAPE), stride=(3, 1))
    set_chunk(made._local_tensor, (low, 0))
    return made


def save_and_load_methods(path: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    sw.save(f"{path}/uneven", {"t": uneven(whole())})
    sw.save(f"{path}/even", {"t": distribute_tensor(whole(), mesh, [Shard(1)])})
    sw.save(f"{path}/plain", {"t": padded_rows(min(dist.get_rank(), 2), whole())})
    for source in ("uneven", "even", "plain"):
        target = uneven()
        sw.load(f"{path}/{source}", {"t": target})
        assert torch.equal(target._local_tensor, uneven(whole())._local_tensor)
        for placement in (Shard(0), Shard(1)):
            other = distribute_tensor(torch.zeros(SHAPE), mesh, [placement])
            sw.load(f"{path}/{source}", {"t": other})
            assert torch.equal(other.full_tensor(), whole())


def test_dtensors_whose_local_tensors_describe_uneven_shards(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_and_load_methods, str(tmp_path), world=4)
    saved = sw.open(tmp_path / "uneven")["t"]
    assert isinstance(saved, sw.SavedTensor)
    assert torch.equal(saved.tensor(), whole())


def uneven_run(*, stepped: bool) -> dict[str, Any]:
    module = nn.Module()
    weight = nn.Parameter(uneven(whole() if stepped else None))
    low = UNEVEN[dist.get_rank()]
    set_chunk(weight._local_tensor, (low, 0))  # type: ignore[attr-defined]
    module.register_parameter("weight", weight)
    optimizer = torch.optim.Adam([weight], lr=0.5)
    state = optimizer.state[weight]
    if stepped:  # torch's own kernels refuse shards that are not those of the placement
        local = weight._local_tensor.detach()  # type: ignore[attr-defined]
        state["step"] = torch.tensor(1.0)
        state["exp_avg"], state["exp_avg_sq"] = (
            DTensor(local * factor, weight._spec, requires_grad=False)  # type: ignore[attr-defined]
            for factor in (2, 3)
        )
    return {"module": module, "optimizer": optimizer}


def resume_uneven(path: str) -> None:
    expected, found = uneven_run(stepped=True), uneven_run(stepped=False)
    sw.save(path, expected)
    sw.load(path, found)
    a, b = (next(iter(each["optimizer"].state.values())) for each in (found, expected))
    for key in ("exp_avg", "exp_avg_sq"):
        assert type(a[key]) is DTensor
        assert torch.equal(a[key]._local_tensor, b[key]._local_tensor)
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SHAPE))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    sw.load(path, {"module": model, "optimizer": optimizer})
    (parameter,) = model.parameters()
    assert torch.equal(parameter.full_tensor(), whole())  # type: ignore[attr-defined]
    assert torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), whole() * 2)


def test_an_optimizer_of_uneven_shards(gang: Gang, tmp_path: Path) -> None:
    gang.run(resume_uneven, str(tmp_path), world=4)


def contradict(path: str, case: str) -> None:
    tensor = uneven(whole())
    local: Any = tensor._local_tensor
    low = UNEVEN[dist.get_rank()]
    if case == "other items":
        set_chunk(local, (low, 0), ((max(low - 1, 0), 0), local.size()))
    elif case == "outside":
        set_chunk(local, (low + 3, 0))
    elif case == "overlap":
        set_chunk(local, (0, 0))
    elif case == "one method":
        del local.__create_write_items__
    elif case == "size":
        wrong = [ChunkStorageMetadata(torch.Size((low, 0)), torch.Size((1, 3)))]
        local.__create_chunk_list__ = lambda: wrong
    sw.save(path, {"t": tensor})


@pytest.mark.parametrize("case", ["other items", "outside", "overlap", "one method", "size"])
def test_methods_that_contradict_are_refused(gang: Gang, tmp_path: Path, case: str) -> None:
    for outcome in gang.run_outcomes(contradict, str(tmp_path), case, world=4):
        assert isinstance(outcome.exception, sw.LayoutError | sw.RankError), outcome
        assert "t: " in str(outcome.exception) or "- t " in str(outcome.exception)


def through_dcp(path: str) -> None:
    dcp.save({"model": {"t": uneven(whole())}}, checkpoint_id=f"{path}/save")
    future = dcp.async_save({"model": {"t": uneven(whole())}}, checkpoint_id=f"{path}/async")
    future.result()  # type: ignore[union-attr]
    for place in ("save", "async"):
        target = uneven()
        sw.load(f"{path}/{place}", {"model": {"t": target}})
        assert torch.equal(target._local_tensor, uneven(whole())._local_tensor)
        target = uneven()
        dcp.load({"model": {"t": target}}, checkpoint_id=f"{path}/{place}")
        assert torch.equal(target._local_tensor, uneven(whole())._local_tensor)


def test_dcps_functions_save_uneven_shards(gang: Gang, tmp_path: Path) -> None:
    gang.run(through_dcp, str(tmp_path), world=4)


def through_dcp_plain(path: str, *, load: bool) -> None:
    """DCP of torch 2.14 understands the attributes; that of earlier versions ignores them."""
    rank = min(dist.get_rank(), 2)
    sw.save(f"{path}/whole", {"model": {"t": padded_rows(rank, whole())}})
    if load:
        target = padded_rows(rank)
        dcp.load({"model": {"t": target}}, checkpoint_id=f"{path}/whole")
        assert torch.equal(target, padded_rows(rank, whole()))
    else:
        source = padded_rows(rank, whole())
        dcp.save({"model": {"t": source}}, checkpoint_id=f"{path}/dcp")
        target = torch.zeros(SHAPE)
        sw.load(f"{path}/dcp", {"model": {"t": target}})
        assert torch.equal(target, whole())


@pytest.mark.parametrize("load", [False, True])
def test_dcps_functions_never_mistake_a_part_for_the_whole(
    gang: Gang, tmp_path: Path, load: bool
) -> None:
    for outcome in gang.run_outcomes(through_dcp_plain, str(tmp_path), load=load, world=4):
        if find_spec("torch.distributed.checkpoint.protocol") is not None:
            assert outcome.exception is None
        else:
            assert isinstance(outcome.exception, dcp.CheckpointError), outcome
            assert "model.t" in str(outcome.exception)
