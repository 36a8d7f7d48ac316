"""What every format version has written stays readable, with this library and without it."""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.compat.golden import (
    DTYPES,
    GOLDEN,
    METRICS,
    OBJECTS,
    SHARDED,
    STEP,
    VERSION_2,
    WORLD,
    boxes,
    expected,
    make,
)

every_version = pytest.mark.parametrize("version", GOLDEN)


def content(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@every_version
def test_every_tensor_is_what_it_was(version: int) -> None:
    checkpoint = sw.open(GOLDEN[version])
    assert checkpoint.verify().bytes_checked > 0
    assert (checkpoint.step, checkpoint.world_size) == (STEP, WORLD)
    assert checkpoint.layout.metrics == METRICS
    found = {
        name: (str(saved.dtype).removeprefix("torch."), tuple(saved.shape), content(saved[...]))
        for name, saved in checkpoint.tensors().items()
    }
    assert found == expected(version)


@every_version
def test_every_plain_value_is_what_it_was(version: int) -> None:
    checkpoint = sw.open(GOLDEN[version])
    plain = {name: checkpoint[f"objects.{name}"] for name in OBJECTS if name != "nested"}
    assert plain == {name: value for name, value in OBJECTS.items() if name != "nested"}
    assert checkpoint["objects.nested.list"] == OBJECTS["nested"]["list"]
    assert type(checkpoint["objects.shape"]) is tuple


def blank(name: str, rank: int | None = None) -> Any:
    """Memory for a tensor, or for what a rank held of it, that is not what was saved."""
    dtype, shape, _ = expected()[name]
    parts = [sw.Box.whole(shape)] if rank is None else boxes(name, rank)
    memory = [
        (box, torch.zeros((*box.shape, itemsize_of(name)), dtype=torch.uint8)) for box in parts
    ]
    typed = [(box, raw.view(getattr(torch, dtype)).reshape(box.shape)) for box, raw in memory]
    return typed[0][1] if rank is None else sw.Shards(shape, getattr(torch, dtype), typed)


def itemsize_of(name: str) -> int:
    return int(torch.empty(0, dtype=getattr(torch, expected()[name][0])).element_size())


@every_version
def test_it_loads_into_ranks_as_they_were(version: int) -> None:
    def load(group: ThreadGroup) -> None:
        dtypes = {name: blank(f"dtypes.{name}") for name in DTYPES}
        sharded = {name: blank(name, group.rank) for name in SHARDED[version]}
        plain: dict[str, Any] = dict.fromkeys(OBJECTS) | {"nested": {"list": None}}
        own, first = sw.PerRank(None), blank("tied.first")
        target = {"dtypes": dtypes, "tied": {"first": first, "second": first}, "own": own}
        target |= {"objects": plain, "scalar": blank("scalar"), "empty": blank("empty")}
        sw.load(GOLDEN[version], target | sharded, group=group)
        assert own.value == {"rank": group.rank}
        assert plain == OBJECTS
        wanted = expected()
        assert content(first) == wanted["tied.first"][2]
        assert content(target["scalar"]) == wanted["scalar"][2]
        for name, tensor in dtypes.items():
            assert content(tensor) == wanted[f"dtypes.{name}"][2]
        for name, shards in sharded.items():
            _, shape, raw = wanted[name]
            whole = np.frombuffer(raw, np.uint8).reshape(*shape, itemsize_of(name))
            for fragment in shards.fragments:
                assert content(fragment.data) == whole[fragment.box.slices()].tobytes()

    run_ranks(WORLD, load)


def test_what_is_written_today_is_laid_out_as_it_was(tmp_path: Path) -> None:
    """Until there is a version 3, a reader of version 2 reads what is saved now."""
    make(tmp_path / "it")
    now, then = (
        json.loads((place / "manifest.json").read_bytes()) for place in (tmp_path / "it", VERSION_2)
    )
    for document in (now, then):
        del document["crc32"], document["created"], document["save_id"]
        for file in document["files"]:
            del file["checksums_crc32"]
    assert now == then


class Reader:
    """Format versions 1 and 2, read with the standard library and numpy alone."""

    def __init__(self, place: Path) -> None:
        text = (place / "manifest.json").read_bytes()
        self.manifest = json.loads(text)
        body = text[: text.rindex(b'"crc32"')]
        assert self.manifest["format"] == "shardwise"
        assert self.manifest["crc32"] == zlib.crc32(body)
        self.listed = self.manifest["files"] if self.manifest["version"] == 1 else self.by_rule()
        self.files = [self.checked(place, file) for file in self.listed]
        self.tensors = {tensor["name"]: tensor for tensor in self.manifest["tensors"]}

    def by_rule(self) -> list[dict[str, Any]]:
        """The entries of version 1 for the files of version 2."""
        files = {}
        for rule in self.manifest["files"]:
            ranks = [first + k * step for first, n, step in rule["ranks"] for k in range(n)]
            for rank, crc in zip(ranks, rule["checksums_crc32"], strict=True):
                name = f"r{rank:05d}-{self.manifest['save_id']}.safetensors"
                files[rank] = rule | {"name": name, "checksums_crc32": crc}
        return [files[rank] for rank in sorted(files)]

    @staticmethod
    def checked(place: Path, file: dict[str, Any]) -> bytes:
        """A data file, every block of which has its checksum."""
        data = (place / file["name"]).read_bytes()
        table = data[file["checksums_at"] :]
        assert len(data) == file["size"]
        assert zlib.crc32(table) == file["checksums_crc32"]
        for block, low in enumerate(range(0, file["checksums_at"], 65_536)):
            crc = zlib.crc32(data[low : min(low + 65_536, file["checksums_at"])])
            assert crc == int.from_bytes(table[4 * block : 4 * block + 4], "little")
        return data

    def raw(self, name: str, itemsize: int) -> npt.NDArray[np.uint8]:
        """A tensor's bytes, an element's in the last dimension."""
        tensor = self.tensors[name]
        tensor = self.tensors[tensor.get("same_as", name)]
        out = np.zeros((*tensor["shape"], itemsize), np.uint8)
        for piece in tensor.get("pieces", []):
            axes = piece.get("repeat", [])
            axes = [axes] if isinstance(axes, dict) else axes
            for ks in itertools.product(*(range(axis["count"]) for axis in axes)):
                moves = list(zip(ks, axes, strict=True))
                file = piece["file"] + sum(k * axis.get("file", 0) for k, axis in moves)
                start = piece["start"] + sum(k * axis.get("start", 0) for k, axis in moves)
                offset = [
                    o + sum(k * axis["offset"][dim] for k, axis in moves)
                    for dim, o in enumerate(piece["offset"])
                ]
                box = tuple(slice(o, o + n) for o, n in zip(offset, piece["shape"], strict=True))
                part = out[box]
                at = self.listed[file]["data_at"] + start
                data = np.frombuffer(self.files[file], np.uint8, part.size, at)
                out[box] = data.reshape(part.shape)
        return out


@every_version
def test_a_reader_of_fifty_lines_reads_it(version: int) -> None:
    reader = Reader(GOLDEN[version])
    assert list(reader.tensors) == list(sw.open(GOLDEN[version]).tensors())
    for name, (_, shape, raw) in expected(version).items():
        found = reader.raw(name, itemsize_of(name))
        assert found.shape == (*shape, itemsize_of(name))
        assert found.tobytes() == raw
    assert any("repeat" in piece for piece in reader.tensors["runs"]["pieces"])


@every_version
def test_its_data_files_are_safetensors_files(version: int) -> None:
    safetensors = pytest.importorskip("safetensors")
    keys: list[str] = []
    for path in sorted(GOLDEN[version].glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            keys += file.keys()
            if "rows[0:3,0:3]" in file.keys():  # noqa: SIM118 - it is no dict
                part = file.get_tensor("rows[0:3,0:3]")
                assert content(part) == expected()["rows"][2][:36]
    assert {"rows[0:3,0:3]", "rows[3:4,0:3]", "scalar", "dtypes.bfloat16"} <= set(keys)


@pytest.mark.parametrize("version", [0, 3, 99])
def test_a_version_that_is_unknown_is_named(tmp_path: Path, version: int) -> None:
    place = Path(shutil.copytree(VERSION_2, tmp_path / "it"))
    text = (place / "manifest.json").read_bytes().replace(b'"version":2', b'"version":%d' % version)
    body = text[: text.rindex(b'"crc32"')]
    (place / "manifest.json").write_bytes(body + b'"crc32":%d}\n' % zlib.crc32(body))
    with pytest.raises(sw.FormatError, match=f"version {version}.*reads 'shardwise' versions 1"):
        sw.open(place)


@every_version
def test_the_golden_files_cover_every_kind_of_sharding(version: int) -> None:
    pieces = {name: len(sw.open(GOLDEN[version]).boxes(name)) for name in SHARDED[version]}
    grid = {"grid": 24} if version > 1 else {}
    assert pieces == {"rows": 2, "flat": 4, "strided": 4, "runs": 6, **grid}


def test_version_2_has_files_by_rule_and_pieces_along_two_axes() -> None:
    reader = Reader(VERSION_2)
    assert [rule["ranks"] for rule in reader.manifest["files"]] == [[[0, 1, 1]], [[1, 1, 1]]]
    axes = [[axis["count"] for axis in p["repeat"]] for p in reader.tensors["grid"]["pieces"]]
    assert axes == [[4, 3], [4, 3]]
