"""ByteCheckpoint and torchsnapshot: checkpoints that they made, and what they restored of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.state.objects import decode
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened, unpacked
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
    foreign = opened(unpacked("bytecheckpoint", tmp_path) / "global_step_3")
    values = {entry.name: decode(entry.value, entry.name) for entry in foreign.objects}
    (group,) = values["optimizer.param_groups"]
    assert group["members"] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert group["value"]["lr"] == 0.01
    assert values["extra_state"] == {"epoch": 2}
    assert foreign.step == 3
    assert foreign.left_out == ("extra_state of 1 ranks: that of rank 0 is taken",)


def test_torchsnapshot_has_values_and_replicas(tmp_path: Path) -> None:
    foreign = opened(unpacked("torchsnapshot", tmp_path))
    values = {entry.name: decode(entry.value, entry.name) for entry in foreign.objects}
    assert values["more.flags"] == [True, {"x": b"12"}]
    assert (values["more.epoch"], values["more.rate"], values["more.name"]) == (2, 0.5, "a/b")
    assert values["optimizer.param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    assert len(foreign.replicas) == 15 - 2
    assert not foreign.left_out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"location": "../../etc/passwd"}, "has no file"),
        ({"byte_range": [0, 4]}, "has not as many bytes as its shape"),
        ({"byte_range": [2**40, 2**40 + 160]}, "lies outside of its file"),
        ({"dtype": "torch.qint8"}, "dtype .torch.qint8. is not read"),
        ({"serializer": "per_tensor_qtensor"}, "restore it with torchsnapshot"),
        ({"shape": [-1]}, "is not what torchsnapshot 0.1 writes"),
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
