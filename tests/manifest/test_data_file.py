"""Data files are safetensors files, and lie as the manifest says."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import Box
from shardwise.manifest.checksums import block_count
from shardwise.manifest.data_file import ALIGNMENT, encode_header_entries, lay_out_file
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.names import CHECKSUMS_KEY, OBJECTS_KEY

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
