"""Readers: ours and the example of the page pass the suite, and the page's rules hold."""

from __future__ import annotations

import json
import re
import struct
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shardwise as sw
from shardwise.parts.formats.reader import Builder, FileTree, Reader, StoredArray
from shardwise.testing.reader_suite import (
    ReaderSuite,
    Tensors,
    Write,
    make_tensors,
    reader_of,
)

PAGE = Path(__file__).parents[2] / "docs" / "ports" / "reader.md"


def install(folder: Path, name: str, entry: str, code: str, patch: pytest.MonkeyPatch) -> None:
    """Install a module with an entry point of the group `shardwise.readers`."""
    described = folder / f"{name}-1.0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[shardwise.readers]\n{entry} = {name}:READER\n")
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, name, raising=False)


class TestHuggingFace(ReaderSuite):
    @pytest.fixture
    def reader(self) -> Reader:
        return reader_of("hf")

    @pytest.fixture
    def write(self) -> Write:
        def write(folder: Path, tensors: Tensors) -> Path:
            names = [*tensors]
            files = {
                name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(names)
            }
            for file in set(files.values()):
                save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
            index = {"metadata": {}, "weight_map": files}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            return folder

        return write

    @pytest.mark.long  # other readers here read damaged files, and so do test_hostile_files.py, …
    def test_a_damaged_file_raises_nothing_else(
        self, key: str, place: Path, tmp_path: Path
    ) -> None:
        super().test_a_damaged_file_raises_nothing_else(key, place, tmp_path)


class TestTorchSave(ReaderSuite):
    @pytest.fixture
    def reader(self) -> Reader:
        return reader_of("torch")

    @pytest.fixture(params=[True, False])
    def write(self, request: pytest.FixtureRequest) -> Write:
        def write(folder: Path, tensors: Tensors) -> Path:
            place = folder / "last.pt"
            state = {"model": dict(tensors)}
            torch.save(state, place, _use_new_zipfile_serialization=request.param)
            return place

        return write


class TestDcp(ReaderSuite):
    @pytest.fixture
    def reader(self) -> Reader:
        return reader_of("dcp")

    @pytest.fixture
    def write(self) -> Write:
        def write(folder: Path, tensors: Tensors) -> Path:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                dcp.save({"model": dict(tensors)}, checkpoint_id=folder, no_dist=True)
            return folder

        return write

    @pytest.mark.long  # other readers here read damaged files, and so do test_hostile_files.py, …
    def test_a_damaged_file_raises_nothing_else(
        self, key: str, place: Path, tmp_path: Path
    ) -> None:
        super().test_a_damaged_file_raises_nothing_else(key, place, tmp_path)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the page, installed as a package."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    install(tmp_path / "packages", "stripes", "stripes", code, monkeypatch)


def write_stripes(folder: Path, tensors: Tensors, ranks: int = 2) -> Path:
    for rank in range(ranks):
        stripes, data = [], b""
        for name, tensor in tensors.items():
            rows = tensor.chunk(ranks)[rank].contiguous()
            first = rank * -(-len(tensor) // ranks)
            stripes.append(
                {
                    "name": name,
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "shape": list(tensor.shape),
                    "first_row": first,
                    "rows": len(rows),
                    "start": len(data),
                }
            )
            data += rows.view(torch.uint8).numpy().tobytes()
        header = json.dumps({"step": 7, "stripes": stripes}).encode()
        file = folder / f"rank{rank}-of-{ranks}.stripes"
        file.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return folder


class TestTheExample(ReaderSuite):
    prefix = ""

    @pytest.fixture
    def reader(self, example: None) -> Reader:
        return reader_of("stripes")

    @pytest.fixture
    def write(self) -> Write:
        return write_stripes


@pytest.mark.usefixtures("example")
def test_the_suite_notices_a_reader_that_uses_much_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stripes(tmp_path, make_tensors(), ranks=3)
    open_checkpoint = sw.open

    def use_memory(*args: Any, **options: Any) -> sw.Checkpoint:
        b"x" * (1 << 27)
        return open_checkpoint(*args, **options)

    monkeypatch.setattr(sw, "open", use_memory)
    with pytest.raises(AssertionError, match="bytes of memory for a small file"):
        TestTheExample()._check(tmp_path, "stripes", "")


@pytest.mark.usefixtures("example")
def test_the_example_is_found_by_its_entry_point(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_stripes(folder, make_tensors(), ranks=3)
    checkpoint = sw.open(folder)
    assert checkpoint.step == 7
    out = torch.zeros(6, 8)
    sw.load(folder, {"first.weight": out}, format="stripes")
    assert torch.equal(out, make_tensors()["first.weight"])
    (folder / "rank1-of-3.stripes").unlink()
    with pytest.raises(sw.FormatError, match=r"rank1-of-3\.stripes"):
        sw.open(folder)


def test_a_value_of_another_kind_is_refused(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "a.pt")
    assert FileTree(tmp_path).load("a.pt", kind=list) == [1]
    with pytest.raises(sw.FormatError, match=r"a\.pt: expected a dict, found list: copy the file"):
        FileTree(tmp_path).load("a.pt", kind=dict)


def test_an_array_that_is_not_flat_is_named_by_the_tensor_that_it_belongs_to(
    tmp_path: Path,
) -> None:
    builder = Builder(FileTree(tmp_path))
    for name in ("first", "second"):
        builder.add_tensor(name, "float32", (4,))
    arrays = [
        StoredArray.contiguous("a", 0, "float32", (4,)),
        StoredArray.contiguous("b", 0, "float32", (2, 2)),
    ]
    ranges = np.array([[0, 1], [0, 1], [0, 0], [4, 4], [0, 0]])
    with pytest.raises(sw.FormatError, match=r"^second: an array of shape \[2, 2\] in 'b'"):
        builder.add_flat_ranges(
            [("first", (4,), ()), ("second", (4,), ())], [False, False], arrays, tuple(ranges)
        )


@pytest.mark.parametrize(
    ("step", "expected"), [(7, 7), (0, 0), (-1, None), ("7", None), (True, None), (None, None)]
)
def test_a_step_is_a_number_of_steps(tmp_path: Path, step: object, expected: int | None) -> None:
    (tmp_path / "a").touch()
    builder = Builder(FileTree(tmp_path))
    builder.step = step
    assert builder.build("it").step == expected


RANGES_READER = """
from shardwise.parts.formats.reader import Reader, StoredArray

def read(tree, builder):
    builder.add_tensor("w", "float32", (4, 6))
    ranges = tree.read_json("ranges.json", list[tuple[int, int, int]], "a list of ranges")
    for start, count, stride in ranges:
        array = StoredArray("w.raw", 4 * start, "float32", (count,), (stride,))
        builder.add_flat_range("w", start, array)

READER = Reader("ranges", lambda tree: "w.raw" in tree.sizes, read)
"""


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ([(10, 14, 1), (0, 10, 1)], None),
        ([(0, 10, 1), (10, 0, 1), (10, 14, 1)], None),
        ([(0, 10, 1), (10, 15, 1)], "elements 10 to 25 are not a range of a flat tensor"),
        ([(0, 10, 1), (-1, 14, 1)], "elements -1 to 13 are not a range"),
        ([(0, 24, 2)], "is not flat"),
    ],
)
def test_ranges_of_a_flattened_tensor(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranges: list[tuple[int, int, int]],
    said: str | None,
) -> None:
    install(tmp_path / "packages", "ranges_reader", "ranges", RANGES_READER, monkeypatch)
    tensor = torch.arange(24.0).reshape(4, 6)
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "w.raw").write_bytes(tensor.numpy().tobytes())
    (place / "ranges.json").write_text(json.dumps(ranges))
    if said is None:
        assert torch.equal(sw.open(place)["w"][:], tensor)
    else:
        with pytest.raises(sw.FormatError, match=said):
            sw.open(place)
