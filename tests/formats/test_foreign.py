"""A manifest laid over foreign files: read by the engine as one of our own is."""

from __future__ import annotations

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.kernel.checkpoint import Checkpoint
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.layout import Layout, StoredFile, decode_layout, encode_layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.kernel.manifest.validate import validate_layout
from shardwise.kernel.store import LocalStore
from shardwise.parts.formats import opening
from shardwise.parts.formats.foreign import StoredArray
from shardwise.parts.formats.merge_ranks import merge_ranks
from shardwise.parts.formats.opening import check_layout
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples


@dataclass
class Row:
    """A piece: its tensor and file, and where its elements lie."""

    tensor: int
    file: int
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def table(rows: list[Row]) -> Pieces:
    dims = max((len(row.shape) for row in rows), default=0)

    def columns(name: str, fill: int) -> np.ndarray:
        padded = [(*getattr(r, name), *(fill,) * (dims - len(r.shape))) for r in rows]
        return np.array(padded, np.int64).reshape(len(rows), dims)

    flat = [np.array([getattr(r, n) for r in rows], np.int64) for n in ("tensor", "file", "start")]
    return Pieces(*flat, columns("offset", 0), columns("shape", 1), columns("stride", 0))


def foreign_of(tensors: list[TensorEntry], rows: list[Row], *files: StoredFile) -> Layout:
    runs = Runs.of_pieces(table(rows))
    return Layout(format="made here", files=files, tensors=tuple(tensors), runs=runs)


def scattered(values: np.ndarray, folder: Path, seed: int) -> Layout:
    """Cut an array in two, and lay each part in a file of its own, permuted, at an odd byte."""
    random = np.random.default_rng(seed)
    cut = int(random.integers(1, values.shape[0])) if values.shape[0] > 1 else values.shape[0]
    rows, files = [], []
    for number, (low, part) in enumerate([(0, values[:cut]), (cut, values[cut:])]):
        order = random.permutation(values.ndim)
        start = int(random.integers(0, 9))
        data = bytes(start) + np.ascontiguousarray(part.transpose(order)).tobytes()
        (folder / f"{number}.bin").write_bytes(data)
        files.append(StoredFile(f"{number}.bin", len(data)))
        if part.size:
            inner = np.ascontiguousarray(part.transpose(order)).strides
            stride = [0] * values.ndim
            for at, dim in enumerate(order.tolist()):
                stride[dim] = inner[at] // values.itemsize
            offset = (low, *(0,) * (values.ndim - 1))
            rows.append(Row(0, number, start, offset, part.shape, tuple(stride)))
    entry = TensorEntry("w", str(values.dtype), values.shape)
    return foreign_of([entry], rows, *files)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["float32", "int64", "uint8"]),
    st.integers(0, 2**32),
)
def test_arrays_in_any_order_at_any_byte_are_read(shape: list[int], dtype: str, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 250, shape).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        foreign = decode_layout(encode_layout(scattered(values, Path(folder), seed)))
        read = Checkpoint(*check_layout(LocalStore(folder), foreign), verify=True)["w"]
        assert isinstance(read, sw.SavedTensor)
        assert np.array_equal(read[...].numpy(), values)
        assert np.array_equal(read[shape[0] // 2 :].numpy(), values[shape[0] // 2 :])


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """What the place that is opened next is said to be."""
    found: list[Layout] = []
    monkeypatch.setattr(opening, "read_foreign", lambda *_, **__: found[-1])
    return found


@examples(10)
@given(st.integers(0, 2**32))
def test_reads_that_are_cut_anywhere_lose_no_element(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.integers(0, 2**60, (2, 3, int(random.integers(1, 60_000)))).astype(np.int64)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        foreign = scattered(values, Path(folder), seed)
        patch.setattr(opening, "read_foreign", lambda *_, **__: foreign)

        def load(group: ThreadGroup) -> torch.Tensor:
            out = torch.zeros(values.shape, dtype=torch.int64)
            sw.load(folder, {"w": out}, group=group, staging_bytes=1 << 20)
            return out

        for world in (1, 3):
            for out in run_ranks(world, load):
                assert np.array_equal(out.numpy(), values)


def test_a_average_of_versions_is_what_is_loaded(tmp_path: Path, known: list[Layout]) -> None:
    versions = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    (tmp_path / "a.bin").write_bytes(versions.tobytes())
    rows = [Row(1, 0, 0, (0,), (2,), (1,)), Row(2, 0, 8, (0,), (2,), (1,))]
    foreign = foreign_of([TensorEntry("w", "float32", (2,))], rows, StoredFile("a.bin", 16))
    known.append(dataclasses.replace(foreign, terms=(0, 0)))
    out = torch.zeros(2)
    sw.load(tmp_path, {"w": out})
    assert out.tolist() == [2.0, 3.5]
    assert list(sw.open(tmp_path)) == ["w"]


def test_bytes_that_lie_in_no_file_are_read(tmp_path: Path, known: list[Layout]) -> None:
    (tmp_path / "a.pkl").write_bytes(b"a pickle that has a number")
    content = np.float32(7).tobytes()
    entry = TensorEntry("step", "float32", ())
    known.append(foreign_of([entry], [Row(0, 0, 0, (), (), ())], StoredFile("+0", 4, content)))
    step = torch.tensor(0.0)
    sw.load(tmp_path, {"step": step})
    assert step == 7


ENTRY = TensorEntry("w", "float32", (2, 3))
GOOD = Row(0, 0, 0, (0, 0), (2, 3), (3, 1))
FILE = StoredFile("a.bin", 24)


@pytest.mark.parametrize(
    ("entry", "rows", "file", "says"),
    [
        (ENTRY, [], FILE, "gaps"),
        (ENTRY, [GOOD, GOOD], FILE, "overlap"),
        (ENTRY, [dataclasses.replace(GOOD, start=4)], FILE, "outside of its file"),
        (ENTRY, [dataclasses.replace(GOOD, start=-4)], FILE, "outside of its file"),
        (ENTRY, [dataclasses.replace(GOOD, stride=(2**61, 1))], FILE, "outside of its file"),
        (ENTRY, [dataclasses.replace(GOOD, stride=(2, 1))], FILE, "share bytes"),
        (ENTRY, [dataclasses.replace(GOOD, stride=(0, 0))], FILE, "share bytes"),
        (ENTRY, [dataclasses.replace(GOOD, offset=(1, 0))], FILE, "outside of the tensor"),
        (
            ENTRY,
            [dataclasses.replace(GOOD, file=1)],
            FILE,
            "refers to file 1, but the checkpoint lists 1 file",
        ),
        (
            ENTRY,
            [dataclasses.replace(GOOD, tensor=-1)],
            FILE,
            "refers to tensor -1, but the checkpoint lists 1 tensor",
        ),
        (ENTRY, [GOOD], StoredFile("../a.bin", 24), "not a path below"),
        (ENTRY, [GOOD], StoredFile("/a.bin", 24), "not a path below"),
        (TensorEntry("w", "float31", (2, 3)), [GOOD], FILE, "unknown dtype 'float31'"),
        (TensorEntry("w", "float32", (2**62, 2**62)), [GOOD], FILE, "has more than"),
        (TensorEntry("w", "float32", (2, 3), same_as="v"), [], FILE, "tied"),
    ],
)
def test_what_does_not_hold_together_is_refused(
    entry: TensorEntry, rows: list[Row], file: StoredFile, says: str
) -> None:
    assert validate_layout(foreign_of([ENTRY], [GOOD], FILE))
    with pytest.raises(FormatError, match=says):
        validate_layout(foreign_of([entry], rows, file))


def test_a_place_of_no_known_format_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(
        sw.CheckpointNotFoundError, match=r"known format \(.*it contains notes\.txt"
    ):
        sw.open(tmp_path)


def test_files_that_are_no_checkpoints_are_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(sw.CheckpointNotFoundError, match=r"\)\. Check the path"):
        sw.open(tmp_path / "notes.txt")
    np.savez(tmp_path / "arrays.npz", x=np.ones(3))
    with pytest.raises(FormatError, match=r"without data\.pkl; pass a file of torch\.save"):
        sw.open(tmp_path / "arrays.npz")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(FormatError, match=r"such as model\.state_dict\(\)"):
        sw.open(tmp_path / "module.pt")


def plain_array(file: str) -> StoredArray:
    return StoredArray.contiguous(file, 0, "float32", (2,))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            [3, plain_array("rank1.pt")],
            r"w is a tensor of dtype float32 and shape \[2\] and a value of type int: "
            r"rank1\.pt and rank0\.pt\.",
        ),
        (
            [plain_array("rank0.pt"), [1]],
            r"w is a tensor of dtype float32 and shape \[2\] and a value of type list: "
            r"rank0\.pt and rank1\.pt\.",
        ),
    ],
)
def test_both_files_of_different_values_are_named(values: list[Any], expected: str) -> None:
    states = [(f"rank{rank}.pt", {"w": value}) for rank, value in enumerate(values)]
    with pytest.raises(sw.FormatError, match=expected):
        merge_ranks(states, "place", lambda one, other: True)
