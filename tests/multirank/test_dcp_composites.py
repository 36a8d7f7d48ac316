"""Tensors of torchao in DCP's files, which have them pickled as a whole, loaded on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardwise as sw
from tests.breadth import mostly_long
from tests.multirank.test_tensor_classes import seen, shard, step, training
from tests.tensor_classes.tensors import MAKERS, TRAINING, Holder, bits, values
from tests.tools.gang import Gang

SLICED = ("mxfp8", "mxfp4", "mxfp8, swizzled", "nvfp4", "nvfp4, swizzled")
"""Classes whose shards DCP can save: others lack an operation that DTensor.to_local needs."""


def save_rows(path: str, kind: str) -> None:
    dcp.save({"w": shard(MAKERS[kind](values(0)), 0)}, checkpoint_id=path)


def load_rows(path: str, kind: str) -> None:
    live = shard(MAKERS[kind](values(1)), 0)
    sw.load(path, {"w": live}, rename={"w": "model.w"})
    assert bits(live) == bits(shard(MAKERS[kind](values(0)), 0))


@pytest.mark.parametrize(
    ("kind", "world"),
    mostly_long([(k, n) for k in SLICED for n in (1, 2, 4)], [("mxfp4", 4), ("nvfp4", 1)]),
)
def test_rows_load_into_other_shardings(gang: Gang, tmp_path: Path, kind: str, world: int) -> None:
    gang.run(save_rows, str(tmp_path), kind, world=2)
    gang.run(load_rows, str(tmp_path), kind, world=world)


def save_wrapped(path: str) -> None:
    """Save the weights of training with float8, as torchtitan does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {}
    for kind in TRAINING:
        whole = values(0)
        n = len(whole) // dist.get_world_size()
        local = MAKERS[kind](whole[dist.get_rank() * n :][:n].clone())
        meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
        state[kind] = DTensor(local, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
    dcp.save({"model": state}, checkpoint_id=path)


def test_weights_of_training_are_plain(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_wrapped, str(tmp_path), world=2)
    found = sw.open(str(tmp_path))
    assert {*found} == {f"model.{kind}" for kind in TRAINING}
    assert all(torch.equal(each[...], values(0)) for each in found.tensors().values())


def save_training(path: str, name: str, rows: int) -> list[Any]:
    model, optimizer = training(name, sharded=True, rows=rows)
    for at in range(2):
        step(model, optimizer, at)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)
    sw.save(f"{path}-own", {"model": model, "optimizer": optimizer})
    return seen(model, optimizer)


def resume_training(path: str, name: str, rows: int) -> tuple[list[Any], list[Any]]:
    """Return the state that DCP's files give, and that shardwise's own files give."""
    states = []
    for place in (path, f"{path}-own"):
        model, optimizer = training(name, sharded=True, rows=rows)
        sw.load(place, {"model": model, "optimizer": optimizer})
        states.append(seen(model, optimizer))
        step(model, optimizer, 7)
    return states[0], states[1]


@pytest.mark.parametrize(
    ("name", "rows", "world"),
    mostly_long(
        [
            (name, rows, n)
            for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8")
            for rows in (256, 100)
            for n in (1, 2)
        ],
        [("AdamW8bit", 256, 2), ("AdamW8bit", 256, 1), ("AdamW4bit", 100, 2)],
    ),
)
def test_an_optimizer_under_fsdp_resumes(
    gang: Gang, tmp_path: Path, name: str, rows: int, world: int
) -> None:
    path = str(tmp_path / "dcp")
    saved = gang.run(save_training, path, name, rows, world=2)
    for rank, (mine, own) in enumerate(gang.run(resume_training, path, name, rows, world=world)):
        assert mine == own
        if world == 2:
            assert mine == saved[rank]


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind not in ("intx", "int4")])
def test_whole_tensors_of_one_process(tmp_path: Path, kind: str) -> None:
    """DCP 2.13 itself cannot save the other classes, which lack `aten.is_pinned`."""
    saved, live = Holder(MAKERS[kind](values(0))), Holder(MAKERS[kind](values(1)))
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    sw.save(str(tmp_path / "own"), {"model": saved})
    found = sw.open(str(tmp_path / "dcp")).compare(sw.open(str(tmp_path / "own")))
    assert found.same, found
    sw.load(str(tmp_path / "dcp"), {"model": live})
    assert bits(live.weight) == bits(saved.weight)


def save_files(path: str, name: str, rows: int) -> list[Any]:
    model, optimizer = training(name, sharded=True, rows=rows)
    for at in range(2):
        step(model, optimizer, at)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, f"{path}/rank_{dist.get_rank()}.pt")
    sw.save(f"{path}-own", {"model": model, "optimizer": optimizer})
    return seen(model, optimizer)


@pytest.mark.parametrize(("name", "world"), [("AdamW8bit", 2), ("AdamW4bit", 1)])
def test_an_optimizer_resumes_from_a_file_of_each_rank(
    gang: Gang, tmp_path: Path, name: str, world: int
) -> None:
    place = tmp_path / "files"
    place.mkdir()
    saved = gang.run(save_files, str(place), name, 256, world=2)
    for rank, (mine, own) in enumerate(
        gang.run(resume_training, str(place), name, 256, world=world)
    ):
        assert mine == own
        if world == 2:
            assert mine == saved[rank]


def test_a_part_of_one_rank_is_refused(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_files, str(tmp_path), "AdamW8bit", 256, world=2)
    (tmp_path / "rank_1.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"has only one rank's part of model\.0\.weight"):
        sw.open(str(tmp_path / "rank_0.pt"))
