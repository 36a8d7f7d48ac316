"""torchsnapshot: a snapshot that it took, and what it restored of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.parts.formats.reader import Reader
from shardwise.testing.reader_suite import ReaderSuite, Tensors, Write
from shardwise_legacy.torchsnapshot import READER
from tests.commands import run_command
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened, values_of
from tests.formats.reference import read_tensors


def test_it_reads_what_torchsnapshot_restores(snapshot: Path) -> None:
    """FSDP1's shards, chunks and replicas on two ranks."""
    foreign = opened(snapshot)
    read, expected = read_tensors(snapshot, foreign), torch.load(snapshot / "expected.pt")
    assert sorted(read) == sorted(expected)
    for key, value in expected.items():
        assert_same(read[key], value)
    assert foreign.world_size == 2


def test_it_has_values_and_replicas(snapshot: Path) -> None:
    foreign, values = opened(snapshot), values_of(snapshot)
    assert values["more.flags"] == [True, {"x": b"12"}]
    assert (values["more.epoch"], values["more.rate"], values["more.name"]) == (2, 0.5, "a/b")
    assert values["optimizer.param_groups"][0]["params"] == [0, 1, 2, 3, 4]
    assert len(foreign.replicas) == 15 - 2 + 4  # and shards that both ranks have
    assert sw.open(snapshot).verify().bytes_compared > 0
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
        ({"dtype": "torch.qint8"}, "has the dtype 'qint8', which is not supported"),
        ({"serializer": "per_tensor_qtensor"}, "restore it with torchsnapshot"),
        ({"shape": [-1]}, "shape .-1. of dtype float32 needs -4"),
    ],
)
def test_a_lying_snapshot_is_refused(
    change: dict[str, object], complaint: str, snapshot: Path
) -> None:
    file = snapshot / ".snapshot_metadata"
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
        opened(snapshot)


def test_shards_of_several_ranks_are_copies(snapshot: Path) -> None:
    before = len(opened(snapshot).replicas)
    listed = json.loads((snapshot / ".snapshot_metadata").read_text())
    path, entry = next(
        (path, entry)
        for path, entry in listed["manifest"].items()
        if entry["type"] == "ShardedTensor"
    )
    again = json.loads(json.dumps(entry))
    shard = again["shards"][0]
    location = snapshot / shard["tensor"]["location"]
    start, stop = shard["tensor"]["byte_range"] or (0, location.stat().st_size)
    content = location.read_bytes()[start:stop]
    shard["tensor"] |= {"location": "copy", "byte_range": None}
    again["shards"] = [shard]
    listed["manifest"][path.replace("0/", "7/", 1)] = again
    (snapshot / ".snapshot_metadata").write_text(json.dumps(listed))
    (snapshot / "copy").write_bytes(content)
    assert len(opened(snapshot).replicas) == before + 1
    sw.open(snapshot).verify()
    (snapshot / "copy").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(sw.MismatchError, match="and copy at byte 0"):
        sw.open(snapshot).verify()


def write_snapshot(folder: Path, tensors: Tensors) -> Path:
    """Write what torchsnapshot writes of a module on one rank."""
    entries: dict[str, dict[str, object]] = {"0/model": {"type": "dict", "keys": [*tensors]}}
    for name, tensor in tensors.items():
        (folder / name).write_bytes(tensor.view(torch.uint8).numpy().tobytes())
        entries[f"0/model/{name}"] = {
            "type": "Tensor",
            "location": name,
            "serializer": "buffer_protocol",
            "dtype": str(tensor.dtype),
            "shape": [*tensor.shape],
            "replicated": False,
        }
    listed = {"version": "0.1.0", "world_size": 1, "manifest": entries}
    (folder / ".snapshot_metadata").write_text(json.dumps(listed))
    return folder


class TestTheReader(ReaderSuite):
    """The suite that every reader must pass."""

    @pytest.fixture
    def reader(self) -> Reader:
        return READER

    @pytest.fixture
    def write(self) -> Write:
        return write_snapshot


def test_copies_that_differ_are_damage(tmp_path: Path) -> None:
    listed = {
        "version": "0.1.0",
        "world_size": 2,
        "manifest": {
            f"{rank}/app/w": {
                "type": "Tensor",
                "location": f"{rank}/w",
                "serializer": "buffer_protocol",
                "dtype": "torch.float32",
                "shape": [3],
                "replicated": False,
            }
            for rank in range(2)
        },
    }
    (tmp_path / ".snapshot_metadata").write_text(json.dumps(listed))
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "w").write_bytes(torch.arange(3.0).numpy().tobytes())
    ran = run_command("verify", tmp_path, "--json")
    (verdict,) = ran.document["checkpoints"]
    assert (ran.status, verdict["intact"], verdict["compared"]) == (0, True, 12)
    assert verdict["unchecked"] == 24
    (tmp_path / "1" / "w").write_bytes(torch.arange(1.0, 4.0).numpy().tobytes())
    ran = run_command("verify", tmp_path)
    assert ran.status == 1
    assert "app.w: two copies differ, first at [0]: 0/w at byte 0, and 1/w at byte 0" in ran.out
