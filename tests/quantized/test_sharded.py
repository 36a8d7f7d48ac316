"""Sharded targets: each rank computes its own boxes, wherever a shard cuts through blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise as sw
from tests.breadth import mostly_long
from tests.quantized.published import block_fp8, compressed, mxfp4, publish
from tests.tools.gang import Gang, GangError

SCHEMES = {
    "block": block_fp8(300, 200),
    "rows": compressed(300, 200, scales=torch.arange(1, 301)[:, None] / 7),
    "mxfp4": mxfp4(3, 70, 4),
}


class Layer(nn.Module):
    """One parameter."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        self.norm = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))


def load(scheme: str, how: str, place: Path, read_once: bool) -> None:
    """Load under a sharding, and compare all of it."""
    stored = SCHEMES[scheme]
    shape = tuple(stored.values.shape)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    layer: nn.Module = Layer(shape)
    expected = stored.values.bfloat16()
    if how == "fsdp1":
        layer = FullyShardedDataParallel(layer, device_id=torch.device("cpu"))
        report = sw.load(place, {"model": layer}, dequantize=True, read_once=read_once)
        with FullyShardedDataParallel.summon_full_params(layer):
            whole = layer.w.detach().clone()
    else:
        if how == "fsdp2":
            fully_shard(layer, mesh=mesh)
        else:
            shards = distribute_tensor(layer.w.data, mesh, [Shard(int(how))])
            layer.w = nn.Parameter(shards)
        report = sw.load(place, {"model": layer}, dequantize=True, read_once=read_once)
        assert isinstance(layer.w, DTensor)
        whole = layer.w.full_tensor().detach()
    valid = ~expected.isnan()
    assert torch.equal(whole.isnan(), ~valid)
    assert torch.equal(whole[valid], expected[valid])
    assert report.dequantized == ("model.w",)


CASES = [
    (scheme, how, world)
    for scheme in SCHEMES
    for how in ("fsdp1", "fsdp2", "0", "1")
    for world in (2, 3, 4)
]


@pytest.mark.parametrize(
    ("scheme", "how", "world"),
    mostly_long(
        CASES, [("block", "fsdp2", 2), ("block", "1", 3), ("rows", "fsdp1", 2), ("mxfp4", "1", 4)]
    ),
)
def test_shards_that_cut_through_blocks(
    gang: Gang, tmp_path: Path, scheme: str, how: str, world: int
) -> None:
    files = SCHEMES[scheme].files
    place = publish(tmp_path / "model", {**files, "norm": torch.rand(8).bfloat16()}, in_files=3)
    for read_once in (False, True):
        gang.run(load, scheme, how, place, read_once, world=world)


def load_half(place: Path) -> None:
    rank = torch.distributed.get_rank()
    rows = torch.zeros(150, 200)
    box = sw.Box((150 * rank, 0), (150, 200))
    state = {"model": {"w": sw.Shards((300, 200), rows.dtype, [(box, rows)])}}
    try:
        sw.load(place, state, dequantize=True)
    finally:
        assert not rows.any()


def test_all_ranks_fail_if_one_has_bad_scales(gang: Gang, tmp_path: Path) -> None:
    files = dict(SCHEMES["block"].files)
    files["w_scale_inv"] = files["w_scale_inv"].clone()
    files["w_scale_inv"][2, 0] = float("nan")  # only in the half of rank 1
    place = publish(tmp_path / "model", files)
    with pytest.raises(GangError) as error:
        gang.run(load_half, place, world=2)
    assert sorted(error.value.failures) == [0, 1]
    for report in error.value.failures.values():
        assert "model.w_scale_inv: 1 of" in report


def load_with(place: Path) -> None:
    rank = torch.distributed.get_rank()
    sw.load(place, {"model": {"w": torch.zeros(300, 200)}}, dequantize=rank == 0)


def test_ranks_that_differ_in_the_option_are_refused(gang: Gang, tmp_path: Path) -> None:
    place = publish(tmp_path / "model", SCHEMES["block"].files)
    with pytest.raises(GangError, match="dequantize=True"):
        gang.run(load_with, place, world=2)
