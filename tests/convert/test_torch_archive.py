"""Archives that are laid out before their tensors are known: every reader of zip agrees."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.boxes import Box
from shardwise.kernel.manifest.checksums import crc32
from shardwise.kernel.store import LocalStore
from shardwise.parts.convert import write as writing
from shardwise.parts.convert.plan import BytesFromChecksums, OutputFile, TensorPart, size_of
from shardwise.parts.convert.targets.torch_file import ArchiveBuilder, add_torch_file
from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.containers.zip_archive import read_directory


def write(build: OutputFile, path: Path, data: bytes | None) -> None:
    """Write what is laid out; in place of every part `data`, or a hole."""
    at = 0
    cuts = [*build.checksum_boundaries, build.size]
    with open(path, "wb+") as file:
        for segment in build.segments:
            file.seek(at)
            if isinstance(segment, bytes):
                file.write(segment)
            elif isinstance(segment, TensorPart) and data is not None:
                file.write(data)
            elif isinstance(segment, BytesFromChecksums):
                done = [cut for cut in cuts if cut <= at]
                file.write(segment.make_bytes(sums(path, done) if data else [0] * len(done)))
            at += size_of(segment)
            file.flush()
    os.truncate(path, build.size)


def sums(path: Path, cuts: list[int]) -> list[int]:
    content = path.read_bytes()
    return [crc32(content[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]


def test_checksums_follow_the_bytes(tmp_path: Path) -> None:
    file = OutputFile("x.zip")
    file.add(b"before")
    file.align(64)
    start = file.size
    archive = ArchiveBuilder(file)
    part = TensorPart("w", Box.whole((5,)), "float32")
    archive.add("a/known", b"hello")
    archive.add("a/tensor", part)
    archive.add("a/nothing", TensorPart("e", Box.whole((0, 2)), "float32"))
    archive.add("a/again", part)
    archive.close()
    data = bytes(range(20))
    write(file, tmp_path / "x", data)
    (tmp_path / "x.zip").write_bytes((tmp_path / "x").read_bytes()[start:])
    read = zipfile.ZipFile(tmp_path / "x.zip")
    assert read.testzip() is None
    contents = {name: read.read(name) for name in read.namelist()}
    assert contents == {"a/known": b"hello", "a/tensor": data, "a/nothing": b"", "a/again": data}
    stored = LocalStore(tmp_path).open("x.zip")
    entries = read_directory(FileRange(stored, "x.zip", 0, stored.size, "x.zip"))
    assert all(offset % 64 == 0 for offset, _ in entries.values())
    assert {name: size for name, (_, size) in entries.items()} == {
        name: len(content) for name, content in contents.items()
    }


def test_beyond_four_gigabytes_numbers_are_wide(tmp_path: Path) -> None:
    """The tensors are holes, which cost nothing."""
    value = {
        "large": TensorPart("large", Box.whole((5 << 30,)), "uint8"),
        "behind": TensorPart("behind", Box.whole((10,)), "float32"),
    }
    file = OutputFile("large.pt")
    add_torch_file(file, value, "large.pt")
    path = tmp_path / "large.pt"
    write(file, path, None)
    read = zipfile.ZipFile(path)
    sizes = {each.filename: each.file_size for each in read.infolist()}
    assert sizes["archive/data/0"] == 5 << 30
    assert read.read("archive/version") == b"3\n"
    stored = LocalStore(tmp_path).open(path.name)
    entries = read_directory(FileRange(stored, path.name, 0, stored.size, path.name))
    assert {name: size for name, (_, size) in entries.items()} == sizes
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["large"].shape == (5 << 30,)
    assert loaded["behind"].tolist() == [0.0] * 10
    assert loaded["large"][-3:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("count", [1, 65_535])
def test_many_entries(tmp_path: Path, count: int) -> None:
    file = OutputFile("many.zip")
    archive = ArchiveBuilder(file)
    for number in range(count):
        archive.add(f"{number}", b"")
    archive.close()
    write(file, tmp_path / "many.zip", None)
    stored = LocalStore(tmp_path).open("many.zip")
    entries = read_directory(FileRange(stored, "many.zip", 0, stored.size, "many.zip"))
    assert len(entries) == count == len(zipfile.ZipFile(tmp_path / "many.zip").namelist())


@pytest.mark.parametrize("to", ["native", "torch", "dcp", "hf", "deepspeed-universal"])
def test_files_are_the_same_in_chunks_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Chunks end within tensors, and within bytes that are computed from checksums."""
    model = torch.nn.Linear(50, 70)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(50)).sum().backward()
    optimizer.step()
    sw.save(tmp_path / "source", {"model": model, "optimizer": optimizer}, step=1)
    found = []
    for name, size in (("large", writing.CHUNK), ("small", 4096)):
        monkeypatch.setattr(writing, "CHUNK", size)
        sw.export(tmp_path / "source", tmp_path / "new", to=to)  # names depend on the target
        (tmp_path / "new").rename(tmp_path / name)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        found.append(
            {p.relative_to(tmp_path / name): p.read_bytes() for p in files if p.suffix != ".json"}
        )
    assert found[0] == found[1]
    place = tmp_path / "small"
    sw.open(place / "checkpoint.pt" if to == "torch" else place).verify()
