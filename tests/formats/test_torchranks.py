"""Files that each rank saved with torch.save, DTensors in them, opened as one checkpoint."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise as sw
from tests.breadth import OLD_TORCH, examples
from tests.formats.altering import open_with_altered_pickle
from tests.formats.comparing import assert_same
from tests.multirank.models import WORLDS, build, train
from tests.tools.gang import Gang

KINDS = ["fsdp2_uneven", "hsdp", "fsdp2", "tp"]
if not OLD_TORCH:  # before torch 2.10, full_tensor() orders rows wrongly
    KINDS.append("fsdp_tp")
PLACEMENTS = list(itertools.product((Shard(0), Shard(1), Replicate()), repeat=2))
SHAPE = (5, 3)

pytestmark = pytest.mark.ranks


def whole(value: Any) -> Any:
    """The same, with full tensors in place of DTensors; a collective of all ranks."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return value


def save(root: str, world: int) -> None:
    """Save under each parallelism of this world; rank 0 adds what the tensors are as a whole."""
    rank = dist.get_rank()
    for kind in (kind for kind in KINDS if WORLDS[kind] == world):
        state = build(kind, 1)
        train(state)
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
        rest = {"step": 7, "rng": torch.full((8,), rank, dtype=torch.uint8), "note": f"of {rank}"}
        place = Path(root, kind)
        place.mkdir(exist_ok=True)
        torch.save({"model": model, "optimizer": optimizer, **rest}, place / f"rank{rank}.pt")
        full = whole({"model": model, "optimizer": optimizer["state"]})
        verl = Path(root, f"{kind}-verl")
        verl.mkdir(exist_ok=True)
        numbered = {"optim": state["optimizer"].state_dict(), "model": state["model"].state_dict()}
        for name, each in {**numbered, "extra_state": rest}.items():
            torch.save(each, verl / f"{name}_world_size_{world}_rank_{rank}.pt")
        if rank == 0:
            torch.save(full, f"{root}/{kind}.full.pt")
    if world == 4:
        save_placed(Path(root, "placed"), rank)


def save_placed(place: Path, rank: int) -> None:
    place.mkdir(exist_ok=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    named = {"-".join(map(str, each)): list(each) for each in PLACEMENTS}
    state = {
        dtype: {
            name: distribute_tensor(full_of(i, getattr(torch, dtype)), mesh, placements)
            for i, (name, placements) in enumerate(named.items())
        }
        for dtype in ("float32", "bfloat16", "int8")
    }
    tied = state["float32"]["tied"] = state["float32"][next(iter(named))]
    state["float32"]["scalar"] = distribute_tensor(torch.tensor(2.5), mesh, [Replicate()] * 2)
    state["float32"]["transposed"] = tied.t()
    torch.save({"placed": state}, place / f"part_{rank}.pt")
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])
    torch.save({"x": partial}, place.parent / f"partial-rank-{rank}.pt")


def full_of(seed: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(15).reshape(SHAPE) + seed).to(dtype)


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torch-ranks")
    for world in (2, 4):
        gang.run(save, str(root), world, world=world)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_ranks_are_one_checkpoint(saved: Path, kind: str) -> None:
    full = torch.load(saved / f"{kind}.full.pt")
    found = sw.open(saved / kind)
    expected = {f"model.{name}": each for name, each in full["model"].items()}
    for name, state in full["optimizer"].items():
        expected |= {f"optimizer.{name}.{key}": each for key, each in state.items()}
    tensors = found.tensors()
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        assert_same(tensors[name][...], tensor)
    assert found["step"] == 7
    assert len(found["optimizer.param_groups"]) == 2  # type: ignore[arg-type]
    assert found.left_out == (
        "rng: its value differs between ranks",
        "note: its value differs between ranks",
    )
    assert found.world_size == WORLDS[kind]
    found.verify()


@pytest.mark.parametrize("kind", [each for each in KINDS if each in ("fsdp_tp", "fsdp2_uneven")])
def test_as_verl_saves_them_a_run_goes_on_from_them(saved: Path, kind: str) -> None:
    full = torch.load(saved / f"{kind}.full.pt")
    state = build("plain", 2)
    sw.load(saved / f"{kind}-verl", {key: state[key] for key in ("model", "optimizer")})
    assert_same(dict(state["model"].state_dict()), full["model"])
    for name, parameter in state["model"].named_parameters():
        assert_same(state["optimizer"].state[parameter], full["optimizer"][name])
    assert sw.open(saved / f"{kind}-verl")["extra_state"] == {"step": 7}


def test_any_placement_of_any_dtype(saved: Path) -> None:
    found = sw.open(saved / "placed")
    for dtype in ("float32", "bfloat16", "int8"):
        for i, each in enumerate(PLACEMENTS):
            name = f"placed.{dtype}.{'-'.join(map(str, each))}"
            assert_same(found[name][...], full_of(i, getattr(torch, dtype)))  # type: ignore[index]
    assert found["placed.float32.scalar"][...] == 2.5  # type: ignore[index]
    assert_same(found["placed.float32.tied"][...], full_of(0, torch.float32))  # type: ignore[index]
    assert_same(found["placed.float32.transposed"][...], full_of(0, torch.float32).t())  # type: ignore[index]
    ties = {entry.name: entry.same_as for entry in found.layout.tensors if entry.same_as}
    assert [*ties] == ["placed.float32.tied"]
    found.verify()


def test_other_files_beside_are_named(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "tp"
    shutil.copytree(saved / "tp", place)
    torch.save({"w": torch.ones(2)}, place / "ema_10.pt")
    assert sw.open(place).left_out[2:] == (
        "ema_10.pt: not named after a rank as the other files are",
    )


def test_replicas_that_differ_are_found(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "hsdp", tmp_path / "hsdp")
    path = tmp_path / "hsdp" / "rank3.pt"
    state = torch.load(path, weights_only=False)
    local = next(iter(state["model"].values()))._local_tensor
    data = path.read_bytes()
    assert data.count(local.numpy().tobytes()) == 1
    changed = (local + 1).numpy().tobytes()
    path.write_bytes(data.replace(local.numpy().tobytes(), changed))
    with pytest.raises(sw.ShardwiseError):
        sw.open(tmp_path / "hsdp").verify()


def test_a_part_alone_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(
        sw.FormatError, match=r"only one rank's part of .*Open the directory that holds"
    ):
        sw.open(saved / "placed" / "part_1.pt")
    shutil.copytree(saved / "placed", tmp_path / "placed")
    (tmp_path / "placed" / "part_2.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"has only 3 of its 4 shards.*\[1, 0\]"):
        sw.open(tmp_path / "placed")
    shutil.copytree(saved / "tp-verl", tmp_path / "verl")
    (tmp_path / "verl" / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"1 is missing: optim_world_size_2_rank_1\.pt"):
        sw.open(tmp_path / "verl")
    with pytest.raises(
        sw.FormatError, match=r"its placement is Partial .*; save a DTensor that is"
    ):
        sw.open(saved / "partial-rank-0.pt")


def test_files_of_two_saves_are_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "mixed"
    shutil.copytree(saved / "fsdp2", place)
    state = torch.load(place / "rank1.pt", weights_only=False)
    torch.save({**state, "step": 8}, place / "rank1.pt")
    with pytest.raises(
        sw.FormatError, match=r"step differs: rank0\.pt and rank1\.pt\. Either the files"
    ):
        sw.open(place)
    flat = {"state": {0: {"exp_avg": torch.ones(9)}}, "param_groups": [{"params": [0]}]}
    for rank in range(2):
        flat["state"][0]["exp_avg"] += rank  # type: ignore[index]
        torch.save(
            {"model": {}, "optimizer": flat, "mark": state["model"]}, place / f"rank{rank}.pt"
        )
    with pytest.raises(sw.FormatError, match=r"exp_avg is a plain tensor that differs between"):
        sw.open(place)
    shutil.copy(saved / "fsdp2" / "rank0.pt", place / "rank0.pt")
    torch.save({**state, "model": {}}, place / "rank1.pt")
    with pytest.raises(sw.FormatError, match="has only 1 of its 2 shards"):
        sw.open(place)


@examples(
    30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 2**31), st.integers(0, 255), st.integers(1, 3))
def test_altered_pickles_are_read_or_refused(saved: Path, at: int, byte: int, count: int) -> None:
    open_with_altered_pickle(saved / "placed", "part_0.pt", at, byte, count)
