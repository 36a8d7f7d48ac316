"""The parts of the file format: names, checksums, data files and pieces."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest import manifest as names
from shardwise.kernel.manifest.checksums import (
    BLOCK,
    BlockTable,
    block_checksums,
    block_count,
    crc32,
)
from shardwise.kernel.manifest.data_files import FileEntry, FileTable, save_id_of_file
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import (
    ALIGNMENT,
    CHECKSUMS_KEY,
    OBJECTS_KEY,
    TensorEntry,
    encode_header_entries,
    lay_out_file,
)
from shardwise.kernel.manifest.pieces import (
    SHORTEST_RUN,
    Pieces,
    Runs,
    count_tensors,
    decode_tensors,
    encode_tensors,
    find_runs,
)

# Names of files: made here, taken apart here, and refused if a manifest has others.


@pytest.mark.parametrize("step", [0, 7, 99_999_999, 123_456_789_012])
def test_a_step_is_found_in_its_directory(step: int) -> None:
    assert names.step_of_directory(names.step_directory(step)) == step


@pytest.mark.parametrize(
    "name",
    ["step-1", "step-000000001", "step-0000000x", "xstep-00000001", "step-00000001.tmp", "step-"],
)
def test_other_directories_are_no_steps(name: str) -> None:
    assert names.step_of_directory(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../secret",
        "..",
        ".",
        "",
        "a/b",
        "a\\b",
        "a\0b",
        ".hidden",
        "-rf",
        "a b",
        "a\n",
        "naïve",
        "a" * 201,
        "manifest.json",
    ],
)
def test_a_file_that_is_no_plain_component_is_refused(name: str) -> None:
    entry = FileEntry(name, 3, 16, 8, 8, 12, 0)
    with pytest.raises(FormatError, match="not safe to open"):
        FileTable.of([entry], names.new_save_id())


def test_what_a_save_makes_is_known_again() -> None:
    save_id = names.new_save_id()
    assert names.check_save_id(save_id) == save_id
    assert names.new_save_id() != save_id
    for name in (names.data_file(3, save_id), names.data_file(123_456, save_id)):
        assert save_id_of_file(name) == save_id
        assert names.is_file_of_save(name)
    assert names.is_file_of_save(names.lock_file(save_id))
    assert names.is_lock_file(names.lock_file(save_id))
    assert names.is_file_of_save(f".{names.MANIFEST}.0123abcd")


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "model.safetensors", "r1-0000000000000000.safetensors", "notes.txt", ".git"],
)
def test_what_others_make_is_not_ours_to_remove(name: str) -> None:
    assert not names.is_file_of_save(name)


@pytest.mark.parametrize("save_id", ["", "0" * 15, "0" * 17, "G" * 16, "0123456789abcde\n"])
def test_a_save_id_is_hexadecimal(save_id: str) -> None:
    with pytest.raises(FormatError, match="save_id"):
        names.check_save_id(save_id)


# Checksums of blocks: zlib's, and no altered byte goes unseen.


@given(st.binary(max_size=300))
def test_the_checksum_is_that_of_zlib(data: bytes) -> None:
    assert crc32(data) == zlib.crc32(data)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 2**32))
def test_an_altered_byte_is_found_in_its_block(size: int, where: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    sums = block_checksums(data)
    assert len(sums) == block_count(size)
    assert BlockTable(sums).find_damaged(0, data) == []
    if size:
        data[where % size] ^= 1 << where % 8
        assert BlockTable(sums).find_damaged(0, data) == [where % size // BLOCK]


def test_a_short_last_block_is_covered() -> None:
    data = np.ones(BLOCK + 1, np.uint8)
    assert block_checksums(data).tolist() == [zlib.crc32(data[:BLOCK]), zlib.crc32(data[BLOCK:])]


@given(st.integers(0, 6 * BLOCK), st.data())
def test_a_run_of_blocks_is_verified_as_its_blocks_are(size: int, data: st.DataObject) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    table = BlockTable(block_checksums(content))
    first = data.draw(st.integers(0, block_count(size)))
    last = data.draw(st.integers(first, block_count(size)))
    part = content[first * BLOCK : last * BLOCK]
    assert table.find_damaged(first, part) == []
    if len(part):
        where = data.draw(st.integers(0, len(part) - 1))
        part[where] ^= data.draw(st.integers(1, 255))
        assert table.find_damaged(first, part) == [where // BLOCK]


def test_more_than_the_table_covers_is_damaged() -> None:
    content = np.ones(4 * BLOCK, np.uint8)
    table = BlockTable(block_checksums(content[: 2 * BLOCK]))
    with pytest.raises(ValueError, match="shape"):
        table.find_damaged(0, content)


# Data files are safetensors files, and lie as the manifest says.

safetensors = pytest.importorskip("safetensors.numpy")

Piece = tuple[str, str, tuple[int, ...], Box]


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """Boxes of tensors, the widest types first, as they lie in a file."""
    listed = []
    for i in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        part = tuple(draw(st.integers(1, n)) for n in shape)
        listed.append((f"t{i}", dtype, shape, Box((0,) * len(shape), part)))
    return sorted(listed, key=lambda piece: -DTYPES[piece[1]].itemsize)


@given(pieces(), st.sampled_from([0, 1, 1000]), st.text(max_size=20))
def test_any_safetensors_reader_opens_it(
    listed: Sequence[Piece], objects_bytes: int, note: str
) -> None:
    start, file = lay_out_file(note, 3, encode_header_entries(listed), objects_bytes)
    header = json.loads(start[8:])
    assert int.from_bytes(start[:8], "little") == len(start) - 8
    assert file.data_at == len(start)
    assert file.data_at % ALIGNMENT == 0
    assert header["__metadata__"] == {"shardwise": "1", "save_id": note, "rank": "3"}
    sizes = [box.size * DTYPES[dtype].itemsize for _, dtype, _, box in listed]
    assert file.objects_at == file.data_at + sum(sizes)
    assert file.checksums_at == file.objects_at + objects_bytes
    assert file.size == file.checksums_at + 4 * block_count(file.checksums_at)
    entries = list(header.items())[1:]
    assert [entry["data_offsets"][0] for _, entry in entries] == [
        0,
        *(entry["data_offsets"][1] for _, entry in entries[:-1]),
    ]
    assert (OBJECTS_KEY in header) == bool(objects_bytes)
    assert entries[-1][0] == CHECKSUMS_KEY
    if not any(entry["dtype"].startswith(("F8", "BF")) for _, entry in entries):
        read = safetensors.load(start + bytes(file.size - file.data_at))
        stored = [read[key] for key, _ in entries[: len(listed)]]
        assert [array.nbytes for array in stored] == sizes


def test_parts_of_one_tensor_have_keys_of_their_own() -> None:
    shape = (4, 2)
    halves = [("w", "float32", shape, Box((i, 0), (2, 2))) for i in (0, 2)]
    taken = ("w[0:2,0:2]", "float32", (1,), Box((0,), (1,)))
    start, _ = lay_out_file("id", 0, encode_header_entries([taken, *halves]))
    header = json.loads(start[8:])
    assert list(header)[1:4] == ["w[0:2,0:2]", "w[0:2,0:2]'", "w[2:4,0:2]"]


def test_a_name_that_needs_escapes_is_no_matter() -> None:
    whole = Box.whole((1,))
    names = ['"quoted"\\', "Größe", "\u2028", "a" * 4000]
    listed = encode_header_entries((name, "uint8", (1,), whole) for name in names)
    start, file = lay_out_file("id", 0, listed)
    assert list(json.loads(start[8:]))[1:5] == names
    assert math.gcd(file.data_at, ALIGNMENT) == ALIGNMENT


def test_a_tensor_takes_no_place_of_the_metadata() -> None:
    listed = encode_header_entries([("__metadata__", "uint8", (1,), Box.whole((1,)))])
    start, _ = lay_out_file("id", 0, listed)
    header = json.loads(start[8:])
    assert list(header) == ["__metadata__", "__metadata__'", CHECKSUMS_KEY]
    assert header["__metadata__"]["save_id"] == "id"


# Pieces folded into runs, and back.

SHAPE = (64, 64)
Row = tuple[int, int, int, tuple[int, int], tuple[int, int]]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Progressions, one after another, and single pieces between them."""
    listed: list[Row] = []
    small = st.integers(0, 3)
    for tensor in range(draw(st.integers(0, 3))):
        for _ in range(draw(st.integers(0, 3))):
            file, start, offset = draw(
                st.tuples(small, st.integers(0, 99), st.tuples(small, small))
            )
            shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
            step = draw(st.tuples(st.integers(0, 2), small, small, small))
            for k in range(draw(st.integers(1, 6))):
                box = (offset[0] + k * step[2], offset[1] + k * step[3]), shape
                listed.append((tensor, file + k * step[0], start + k * step[1], *box))
    return listed


def columns_of(listed: list[Row]) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Rows as columns."""
    plain = np.array([row[:3] for row in listed], np.int64).reshape(-1, 3)
    boxes = np.array([row[3:] for row in listed], np.int64).reshape(-1, 2, 2)
    return plain[:, 0], plain[:, 1], plain[:, 2], boxes[:, 0], boxes[:, 1]


def rows_of(pieces: Pieces) -> list[Row]:
    """Columns as rows."""
    columns = (
        pieces.tensor.tolist(),
        pieces.file.tolist(),
        pieces.start.tolist(),
        map(tuple, pieces.offset.tolist()),
        map(tuple, pieces.shape.tolist()),
    )
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


@given(rows())
def test_runs_survive_the_manifest(listed: list[Row]) -> None:
    entries = [TensorEntry(f"t{i}", "uint8", SHAPE) for i in range(3)]
    encoded = encode_tensors(entries, find_runs(Runs.of_rows(*columns_of(listed))))
    tensors, runs = decode_tensors(encoded)
    assert tensors == tuple(entries)
    assert count_tensors(encoded) == len(entries)
    assert rows_of(runs.expand()) == listed
    pieces = runs.count.prod(axis=1)
    assert ((pieces == 1) | (pieces >= SHORTEST_RUN)).all()


@pytest.mark.parametrize(
    "sizes", [(9,), (9, 2), (2, 9), (9, 2, 2), (2, 2, 9), (5, 2, 4), (3, 3, 3)]
)
def test_a_sharding_over_several_axes_is_a_rule_for_each_pair_at_most(
    sizes: tuple[int, ...],
) -> None:
    """Two equal runs that are not repeated stay two entries."""
    ranks = math.prod(sizes)
    listed: list[Row] = []
    for k in np.ndindex(*sizes):
        rank = int(np.ravel_multi_index(k, sizes))
        rows, columns = int(np.ravel_multi_index(k[:-1], sizes[:-1])) if k[:-1] else 0, k[-1]
        listed.append((0, rank, 4 * columns, (8 * rows, 3 * columns), (8, 3)))
    entries = [TensorEntry("w", "uint8", (8 * ranks, 64))]
    _, runs = decode_tensors(encode_tensors(entries, find_runs(Runs.of_rows(*columns_of(listed)))))
    outermost = next((n for n in sizes if n > 2), 1)
    assert len(runs) <= math.prod(sizes[: sizes.index(outermost)])
    assert rows_of(runs.expand()) == listed


def test_a_regular_sharding_is_one_rule_however_many_ranks() -> None:
    ranks = 16_384
    listed: list[Row] = [(0, rank, 4096, (8 * rank, 0), (8, 64)) for rank in range(ranks)]
    entries = [TensorEntry("w", "uint8", (8 * ranks, 64))]
    _, runs = decode_tensors(encode_tensors(entries, find_runs(Runs.of_rows(*columns_of(listed)))))
    assert len(runs.count) == 1
    assert rows_of(runs.expand()) == listed
