"""Manifests that somebody made to do harm: refused, before anything is read or allocated."""

from __future__ import annotations

import copy
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.compat.golden import VERSION_1
from tests.manifest.documents import Document, document_of, sealed, sealed_bytes, state_of

Alter = Callable[[Document], object]
MOST_MEMORY = 16 << 20
BLOCK = 64 << 10  # bytes that a checksum covers


def tensor(document: Document, name: str) -> Document:
    """The entry of a tensor."""
    return next(entry for entry in document["tensors"] if entry["name"] == name)


def change(*path: str | int, to: object) -> Alter:
    """Alters one value."""

    def alter(document: Document) -> None:
        here = document
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = to

    return alter


def change_tensor(name: str, *path: str | int, to: object) -> Alter:
    """Alters one value of a tensor."""
    return lambda document: change(*path, to=to)(tensor(document, name))


def repeat_forever(document: Document) -> None:
    piece = {"file": 0, "start": 0, "offset": [0], "shape": [1]}
    rule = {"count": 2**24, "offset": [0], "start": 0}
    entry = tensor(document, "model.weight")
    entry["pieces"] = [piece | {"repeat": [rule]}] * 64


def overlapping_bytes(document: Document) -> None:
    pieces = tensor(document, "sharded")["pieces"]
    pieces[0]["file"] = pieces[1]["file"] = 0
    pieces[0]["start"] = pieces[1]["start"] = 0


def overlapping_boxes(document: Document) -> None:
    pieces = tensor(document, "sharded")["pieces"]
    pieces[1]["offset"] = pieces[0]["offset"]


def tie_cycle(document: Document) -> None:
    weight, tied = tensor(document, "model.weight"), tensor(document, "model.tied")
    del weight["pieces"]
    weight["same_as"], tied["same_as"] = "model.tied", "model.weight"


def same_name(document: Document) -> None:
    document["tensors"].append(copy.deepcopy(tensor(document, "scalar")))


def name_of_object(document: Document) -> None:
    document["objects"].append({"name": "scalar", "value": 1})


def change_ranks(*triples: list[int]) -> Alter:
    """Alters the ranks of the files, with one checksum for each rank."""

    def alter(document: Document) -> None:
        count = sum(triple[1] for triple in triples)
        document["files"][0] |= {"ranks": list(triples), "checksums_crc32": [0] * min(count, 9)}

    return alter


def split_every_way(document: Document) -> None:
    shape = [2] * 20
    piece = {"file": 0, "start": 0, "offset": [0] * 20, "shape": [1] * 20}
    tensor(document, "model.weight").update(shape=shape, pieces=[piece])
    tensor(document, "model.tied").update(shape=shape)


def run_out_of_the_file(document: Document) -> None:
    piece = {"file": 0, "start": 2**62, "offset": [0], "shape": [1]}
    rule = {"count": 6, "offset": [1], "start": 2**62}
    tensor(document, "model.weight")["pieces"] = [piece | {"repeat": [rule]}]


def repeat_in_64_dimensions(count: int) -> Alter:
    """All claims agree with each other, and the file is smaller than they say."""

    def alter(document: Document) -> None:
        shape = [count, *[1] * 63]
        rule = {"count": count, "offset": [1, *[0] * 63], "start": 4}
        piece = {"file": 0, "start": 0, "offset": [0] * 64, "shape": [1] * 64, "repeat": [rule]}
        document["tensors"] = [{"name": "w", "dtype": "float32", "shape": shape, "pieces": [piece]}]
        file = document["files"][0]
        end = file["data_at"] + 4 * count
        file |= {"objects_at": end, "checksums_at": end, "size": end + 4 * -(-end // BLOCK)}

    return alter


PIECE = {"file": 0, "start": 0, "offset": [0], "shape": [6]}
HOSTILE: dict[str, Alter] = {
    "a file with a name": change("files", 0, "name", to="r00000-0123456789abcdef.safetensors"),
    "files named by a path": change("files", 0, "save_id", to="../../../secret"),
    "files named by an id and a line": change("files", 0, "save_id", to="0123456789abcdef\n"),
    "same rank twice": change_ranks([0, 1, 1], [0, 1, 1]),
    "same rank again and again": change_ranks([1, 2, 0]),
    "same rank in two rules": lambda d: d["files"].append(copy.deepcopy(d["files"][0])),
    "rank outside the world": change_ranks([98, 2, 1]),
    "rank past all ranks": change_ranks([1, 2, 2**24 - 1]),
    "absurd rank": change_ranks([2**60, 2, 1]),
    "negative rank": change_ranks([-1, 2, 1]),
    "files without number": change_ranks([0, 2**24 - 1, 1]),
    "more checksums than ranks": change("files", 0, "checksums_crc32", to=[0] * 3),
    "fewer checksums than ranks": change("files", 0, "checksums_crc32", to=[]),
    "negative step": change("step", to=-1),
    "no world": change("world_size", to=0),
    "absurd world": change("world_size", to=2**40),
    "absurd file size": change("files", 0, "size", to=2**61),
    "negative file size": change("files", 0, "size", to=-1),
    "number past 64 bits": change("files", 0, "size", to=2**64),
    "number past all bits": change("files", 0, "size", to=10**400),
    "parts out of order": change("files", 0, "objects_at", to=0),
    "no room for a header": change("files", 0, "data_at", to=0),
    "table of another size": change("files", 0, "checksums_at", to=4100),
    "checksum past 32 bits": change("files", 0, "checksums_crc32", to=[2**32]),
    "overlapping byte ranges": overlapping_bytes,
    "overlapping boxes": overlapping_boxes,
    "a hole": lambda d: tensor(d, "sharded")["pieces"].pop(),
    "no pieces": change_tensor("model.weight", "pieces", to=[]),
    "pieces of an empty tensor": change_tensor(
        "empty", "pieces", to=[{"file": 0, "start": 0, "offset": [0, 0], "shape": [0, 2]}]
    ),
    "piece past its file": change_tensor("model.weight", "pieces", to=[PIECE | {"start": 2**50}]),
    "piece past all files": change_tensor("model.weight", "pieces", to=[PIECE | {"start": 2**62}]),
    "piece in no file": change_tensor("model.weight", "pieces", to=[PIECE | {"file": 2}]),
    "piece before its file": change_tensor("model.weight", "pieces", to=[PIECE | {"start": -8}]),
    "piece outside its tensor": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"offset": [1]}]
    ),
    "piece of other dimensions": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"offset": [0, 0], "shape": [6, 1]}]
    ),
    "repeat of other dimensions": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"repeat": [{"count": 2, "offset": []}]}]
    ),
    "repeat along too many axes": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"repeat": [{"count": 2, "offset": [0]}] * 9}]
    ),
    "repeats that multiply": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"repeat": [{"count": 2**24, "offset": [0]}] * 8}]
    ),
    "repeats that cancel out": change_tensor(
        "model.weight",
        "pieces",
        to=[PIECE | {"repeat": [{"count": 2, "offset": [step]} for step in (2**62, -(2**62))]}],
    ),
    "repeat without end": repeat_forever,
    "repeat in many dimensions": repeat_in_64_dimensions(2**24),
    "repeat in a file that is smaller": repeat_in_64_dimensions(2**17),
    "repeat of absurd count": change_tensor(
        "model.weight", "pieces", to=[PIECE | {"repeat": [{"count": 2**40, "offset": [0]}]}]
    ),
    "repeat out of the file": run_out_of_the_file,
    "absurd shape": change_tensor("model.weight", "shape", to=[2**40, 2**40]),
    "absurd shape behind a zero": change_tensor("empty", "shape", to=[0, 2**61, 2**61]),
    "absurd dimensions": change_tensor("empty", "shape", to=[0] * 65),
    "negative shape": change_tensor("model.weight", "shape", to=[-6]),
    "split every way": split_every_way,
    "unknown dtype": change_tensor("model.weight", "dtype", to="float31"),
    "attribute as a dtype": change_tensor("model.weight", "dtype", to="__class__"),
    "tie to nothing": change_tensor("model.tied", "same_as", to="model.absent"),
    "tie to itself": change_tensor("model.tied", "same_as", to="model.tied"),
    "tie cycle": tie_cycle,
    "tie to another shape": change_tensor("model.tied", "same_as", to="sharded"),
    "tie with pieces": change_tensor("model.tied", "pieces", to=[PIECE]),
    "same name twice": same_name,
    "a tensor's name for an object": name_of_object,
    "empty name": change_tensor("scalar", "name", to=""),
    "reserved name": change_tensor("scalar", "name", to="__shardwise__.objects"),
    "save id that is a path": change("save_id", to="../../../../"),
    "wrong type": change("tensors", to={"name": "w"}),
    "text for a number": change("world_size", to="2"),
    "truth for a number": change("world_size", to=True),
    "fraction for a number": change("files", 0, "size", to=4096.5),
    "nothing for a list": change("tensors", to=None),
    "unknown field": change("execute", to="rm -rf"),
    "missing field": lambda d: d.pop("files"),
    "later version": change("version", to=3),
    "files as in version 1": change("version", to=1),
    "another format": change("format", to="other"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str, small: Path) -> None:
    document = document_of(small)
    HOSTILE[name](document)
    (small / "manifest.json").write_bytes(sealed(document))
    tracemalloc.start()
    try:
        with pytest.raises(sw.FormatError) as caught:
            sw.open(small)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert str(small) in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../../secret",
        ".bashrc",
        "manifest.json",
        "r00001-e398b851ab7f8119.safetensors",
    ],
)
def test_a_file_name_that_is_not_that_of_its_rank_is_refused(name: str, tmp_path: Path) -> None:
    """Version 1 of the format lists names."""
    document = document_of(VERSION_1)
    document["files"][0]["name"] = name
    (tmp_path / "manifest.json").write_bytes(sealed(document))
    with pytest.raises(sw.FormatError, match="not safe to open"):
        sw.open(tmp_path)


@pytest.mark.parametrize("size", [(48 << 20) + 1, 2**31])
def test_a_huge_manifest_is_refused_by_its_size(size: int, small: Path) -> None:
    os.truncate(small / "manifest.json", size)
    tracemalloc.start()
    try:
        with pytest.raises(sw.FormatError, match=f"has {size} bytes, but at most {48 << 20}"):
            sw.open(small)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def test_what_is_altered_above_was_good_before(small: Path) -> None:
    (small / "manifest.json").write_bytes(sealed(document_of(small)))
    sw.open(small).verify()
    target = {"model": {"weight": torch.zeros(6)}}
    sw.load(small, target, strict=False)
    assert torch.equal(target["model"]["weight"], torch.arange(6.0))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"format":"shardwise","version":1,"save_id":"\xff"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"version":' + b"9" * 100_000 + b"}",
    ],
)
def test_what_is_no_manifest_at_all_is_refused(text: bytes, small: Path) -> None:
    for data in (text, sealed_bytes(text), sealed_bytes(text)[:-1]):
        (small / "manifest.json").write_bytes(data)
        with pytest.raises(sw.FormatError):
            sw.open(small)


def test_values_nested_without_end_are_refused(small: Path) -> None:
    text = sealed(document_of(small)).rpartition(b'"crc32"')[0].rstrip(b",\n") + b"}"
    deep = text.replace(b'"value": 7', b'"value": ' + b"[" * 50_000 + b"]" * 50_000)
    assert deep != text
    (small / "manifest.json").write_bytes(sealed_bytes(deep))
    with pytest.raises(sw.FormatError):
        sw.open(small)


@pytest.mark.parametrize("through", ["link", "pipe", "directory"])
def test_a_data_file_that_is_no_plain_file_is_not_opened(through: str, small: Path) -> None:
    name = sw.open(small).layout.files[0].name
    target = small.parent / "elsewhere"
    (small / name).rename(target)
    if through == "link":
        (small / name).symlink_to(target)
    elif through == "pipe":
        os.mkfifo(small / name)
    else:
        (small / name).mkdir()
    with pytest.raises(sw.ShardwiseError, match=r"link|regular file"):
        sw.open(small).verify()
    with pytest.raises(sw.ShardwiseError, match=r"link|regular file"):
        sw.load(small, state_of(0))


@pytest.mark.parametrize("through", ["link", "pipe", "directory"])
def test_a_manifest_that_is_no_plain_file_is_not_opened(through: str, small: Path) -> None:
    (small / "manifest.json").rename(small.parent / "elsewhere")
    if through == "link":
        (small / "manifest.json").symlink_to(small.parent / "elsewhere")
    elif through == "pipe":
        os.mkfifo(small / "manifest.json")
    else:
        (small / "manifest.json").mkdir()
    with pytest.raises(sw.FormatError, match=r"manifest.json is .*(link|regular file)"):
        sw.open(small)
    with pytest.raises(sw.FormatError, match=r"manifest.json is .*(link|regular file)"):
        sw.load(small, state_of(0))
