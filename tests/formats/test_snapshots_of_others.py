"""ByteCheckpoint and torchsnapshot: checkpoints that they made, and what they restored of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened, unpacked, values_of
from tests.formats.reference import read_tensors


@pytest.mark.parametrize(
    ("name", "within"), [("bytecheckpoint", "global_step_3"), ("torchsnapshot", "")]
)
def test_it_reads_what_they_restore(name: str, within: str, tmp_path: Path) -> None:
    """FSDP2 on two ranks; FSDP1's shards, chunks and replicas on two ranks."""
    place = unpacked(name, tmp_path) / within
    foreign = opened(place)
    read, expected = read_tensors(place, foreign), torch.load(tmp_path / "expected.pt")
    assert sorted(read) == sorted(expected)
    for key, value in expected.items():
        assert_same(read[key], value)
    assert foreign.world_size == 2


def test_bytecheckpoint_has_groups_step_and_extra_state(tmp_path: Path) -> None:
    place = unpacked("bytecheckpoint", tmp_path) / "global_step_3"
    foreign, values = sw.open(place), values_of(place)
    (group,) = values["optimizer.param_groups"]
    assert group["members"] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert group["value"]["lr"] == 0.01
    assert values["extra_state"] == {"epoch": 2}
    assert foreign.step == 3
    assert foreign.left_out == ("extra_state of 1 ranks: only that of rank 0 is read",)


def test_torchsnapshot_has_values_and_replicas(tmp_path: Path) -> None:
    place = unpacked("torchsnapshot", tmp_path)
    foreign, values = opened(place), values_of(place)
    assert values["more.flags"] == [True, {"x": b"12"}]
    assert (values["more.epoch"], values["more.rate"], values["more.name"]) == (2, 0.5, "a/b")
    assert values["optimizer.param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    assert len(foreign.replicas) == 15 - 2 + 4  # and shards that both ranks have
    assert sw.open(place).verify().bytes_compared > 0
    assert not foreign.left_out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"location": "../../etc/passwd"}, "refers to the file"),
        (
            {"byte_range": [0, 4]},
            r"byte_range has 4 bytes, but shape \[40\] of dtype float32 needs 160",
        ),
        ({"byte_range": [2**40, 2**40 + 160]}, "lies outside of its file"),
        ({"dtype": "torch.qint8"}, "tensor of dtype .qint8., which is not supported"),
        ({"serializer": "per_tensor_qtensor"}, "restore it with torchsnapshot"),
        ({"shape": [-1]}, "shape .-1. of dtype float32 needs -4"),
    ],
)
def test_a_lying_snapshot_is_refused(
    change: dict[str, object], complaint: str, tmp_path: Path
) -> None:
    file = unpacked("torchsnapshot", tmp_path) / ".snapshot_metadata"
    manifest = json.loads(file.read_text())
    # 40 float32, so that what a range claims of it is 160 bytes
    tensors = (each for each in manifest["manifest"].values() if each["type"] == "Tensor")
    entry = {
        "type": "Tensor",
        "location": next(tensors)["location"],
        "serializer": "buffer_protocol",
        "dtype": "torch.float32",
        "shape": [40],
        "replicated": False,
        "byte_range": [0, 160],
    }
    manifest["manifest"]["0/lie"] = entry | change
    file.write_text(json.dumps(manifest))
    with pytest.raises(sw.FormatError, match=complaint):
        opened(tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_bytecheckpoint_without_its_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    place = unpacked("bytecheckpoint", tmp_path) / "global_step_3"
    (place / "optimizer" / ".metadata").unlink()
    if whole:
        shutil.rmtree(place / "optimizer")
    with caplog.at_level("WARNING", logger="shardwise"):
        found = sw.open(place)
    assert "optimizer/.metadata is missing, so optimizer cannot be loaded" in caplog.text
    assert "optimizer: optimizer/.metadata is missing" in found.left_out
    shapes = {name: tensor.shape for name, tensor in found.tensors().items()}
    state = {name.removeprefix("model."): torch.zeros(shape) for name, shape in shapes.items()}
    moments = {"0.weight": {"exp_avg": torch.zeros(shapes["model.0.weight"])}}
    with pytest.raises(sw.MismatchError, match=r"optimizer/\.metadata is missing, which would"):
        sw.load(place, {"model": state, "optimizer": moments})
    sw.load(place, {"model": state})


def test_torchsnapshot_shards_of_several_ranks_are_copies(tmp_path: Path) -> None:
    place = unpacked("torchsnapshot", tmp_path)
    listed = json.loads((place / ".snapshot_metadata").read_text())
    path, entry = next(
        (path, entry)
        for path, entry in listed["manifest"].items()
        if entry["type"] == "ShardedTensor"
    )
    again = json.loads(json.dumps(entry))
    shard = again["shards"][0]
    location = place / shard["tensor"]["location"]
    start, stop = shard["tensor"]["byte_range"] or (0, location.stat().st_size)
    content = location.read_bytes()[start:stop]
    shard["tensor"] |= {"location": "copy", "byte_range": None}
    again["shards"] = [shard]
    listed["manifest"][path.replace("0/", "7/", 1)] = again
    (place / ".snapshot_metadata").write_text(json.dumps(listed))
    (place / "copy").write_bytes(content)
    before = len(opened(unpacked("torchsnapshot", tmp_path / "other")).replicas)
    assert len(opened(place).replicas) == before + 1
    sw.open(place).verify()
    (place / "copy").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(sw.MismatchError, match="and copy at byte 0"):
        sw.open(place).verify()
