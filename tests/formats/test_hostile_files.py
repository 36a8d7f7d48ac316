"""Files of torch.save and safetensors that were cut, altered, or made to do harm."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.parts.formats.reader import (
    FileRange,
    FileTree,
    FormatError,
    StoredArray,
    read_header,
)
from tests.breadth import examples

MOST_MEMORY = 16 << 20
Entries = dict[str, bytes]


class Bytes:
    """Bytes, as a file."""

    def __init__(self, data: bytes) -> None:
        self.data = np.frombuffer(data, np.uint8)
        self.size = len(data)

    def read_at(self, offset: int, out: np.ndarray[Any, Any]) -> int:
        part = self.data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def part_of(data: bytes) -> FileRange:
    return FileRange(Bytes(data), "it", 0, len(data), "it")


def read_torch_file(data: bytes, *, skip_unknown: bool = False) -> Any:
    return FileTree("it", skip_unknown=skip_unknown).load_range(part_of(data))


def saved(value: object, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int16)}
ZIPPED, LEGACY = saved(WEIGHTS), saved(WEIGHTS, zipped=False)


def entries_of(data: bytes) -> Entries:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def packed(entries: Entries, method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return file.getvalue()


def changed(name: str, data: bytes) -> Callable[[], bytes]:
    return lambda: packed({**entries_of(ZIPPED), f"archive/{name}": data})


def without(name: str) -> Callable[[], bytes]:
    return lambda: packed({k: v for k, v in entries_of(ZIPPED).items() if k != f"archive/{name}"})


def overwritten(at: Callable[[bytes], int], data: bytes) -> Callable[[], bytes]:
    """An archive with some bytes of it overwritten."""

    def make() -> bytes:
        archive = packed(entries_of(ZIPPED))
        start = at(archive)
        return archive[:start] + data + archive[start + len(data) :]

    return make


def in_pickle(old: bytes, new: bytes) -> Callable[[], bytes]:
    def make() -> bytes:
        entries = entries_of(ZIPPED)
        assert old in entries["archive/data.pkl"]
        altered = entries["archive/data.pkl"].replace(old, new, 1)
        return packed({**entries, "archive/data.pkl": altered})

    return make


def bomb() -> bytes:
    return packed({**entries_of(ZIPPED), "archive/data/0": bytes(10**8)}, zipfile.ZIP_DEFLATED)


def end_of(archive: bytes) -> int:
    return archive.rindex(b"PK\x05\x06")


def local(archive: bytes) -> int:
    return archive.index(b"PK\x03\x04", 100)


def central(archive: bytes) -> int:
    return archive.index(b"PK\x01\x02")


HOSTILE: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no archive": lambda: b"PK\x03\x04" + bytes(100),
    "a zip bomb": bomb,
    "no pickle": without("data.pkl"),
    "two pickles": lambda: packed({**entries_of(ZIPPED), "other/data.pkl": b"N."}),
    "the same entry twice": lambda: twice(),
    "no storage": without("data/0"),
    "a shorter storage": changed("data/0", bytes(20)),
    "big-endian": changed("byteorder", b"big"),
    "a pickle that is none": changed("data.pkl", b"\x00" * 10),
    "a pickle that is cut off": changed("data.pkl", entries_of(ZIPPED)["archive/data.pkl"][:-9]),
    "a pickle that runs": changed("data.pkl", b"cposix\nsystem\nX\x02\x00\x00\x00id\x85R."),
    "a storage by a path": in_pickle(b"X\x01\x00\x00\x000", b"X\x01\x00\x00\x00."),
    "more elements than bytes": in_pickle(b"K\x02K\x03\x86", b"K\x02K\x09\x86"),
    "an absurd shape": in_pickle(b"K\x02K\x03\x86", b"K\x02\x8a\x08" + b"\xff" * 7 + b"\x7f\x86"),
    "an absurd shape of no elements": in_pickle(
        b"K\x02K\x03\x86", b"K\x00\x8a\x09" + b"\xff" * 8 + b"\x00\x86"
    ),
    "a shape that is negative": in_pickle(b"K\x02K\x03\x86", b"K\x02J\xff\xff\xff\xff\x86"),
    "a stride that is negative": in_pickle(b"K\x03K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),
    "a stride that leads out": in_pickle(b"K\x03K\x01\x86", b"K\x04K\x01\x86"),
    "fewer strides than sizes": in_pickle(b"K\x03K\x01\x86", b"K\x03\x85"),
    "no end": overwritten(end_of, b"PK\x00\x00"),
    "a directory that lies outside": overwritten(lambda a: end_of(a) + 16, b"\xff\xff\xff\x7f"),
    "a directory of another size": overwritten(lambda a: end_of(a) + 12, b"\x01"),
    "a header of another entry": overwritten(lambda a: local(a) + 30, b"x"),
    "a header that says compressed": overwritten(lambda a: local(a) + 8, b"\x08"),
    "a header of another size": overwritten(lambda a: local(a) + 18, b"\x07\x00\x00\x00"),
    "a header that is none": overwritten(local, b"PK\x03\x05"),
    "a header with a longer name": overwritten(lambda a: local(a) + 26, b"\xff\x00"),
    "a header with extras without end": overwritten(lambda a: local(a) + 28, b"\xff\xff"),
    "an encrypted entry": overwritten(lambda a: central(a) + 8, b"\x01"),
    "an entry that lies outside": overwritten(lambda a: central(a) + 42, b"\xff\xff\xff\x7f"),
    "an entry of absurd size": overwritten(lambda a: central(a) + 20, b"\xff\xff\xff\x7f" * 2),
    "an entry of no size": overwritten(lambda a: central(a) + 20, b"\xff\xff\xff\xff" * 2),
    "entries that overlap": overwritten(lambda a: central(a) + 20, b"\xff\x01\x00\x00" * 2),
}


def twice() -> bytes:
    entries = entries_of(ZIPPED)
    renamed = packed({**entries, "archive/data/9": bytes(24)})
    return renamed.replace(b"archive/data/9", b"archive/data/0")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str) -> None:
    data = HOSTILE[name]()
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="it"):
            read_torch_file(data)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def test_what_is_altered_above_was_good_before() -> None:
    for data in (ZIPPED, packed(entries_of(ZIPPED))):
        assert set(read_torch_file(data)) == {"a", "b"}


@pytest.mark.parametrize("data", [ZIPPED, LEGACY], ids=["zipped", "legacy"])
def test_a_file_that_is_cut_is_refused(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(FormatError):
            read_torch_file(data[:size])


@examples(200)
@given(st.sampled_from([ZIPPED, LEGACY]), st.data())
def test_an_altered_file_is_refused_or_stays_within_itself(
    data: bytes, draw: st.DataObject
) -> None:
    altered = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        altered[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(FormatError):
        value = read_torch_file(bytes(altered), skip_unknown=True)
        assert_within(value, len(data))


def assert_within(value: Any, size: int) -> None:
    """That all elements of arrays lie in a file of this size."""
    arrays = [value] if isinstance(value, StoredArray) else []
    if isinstance(value, dict):
        arrays = [each for each in value.values() if isinstance(each, StoredArray)]
    for each in arrays:
        steps = zip(each.shape, each.stride, strict=True)
        elements = 0 if 0 in each.shape else 1 + sum((n - 1) * step for n, step in steps)
        assert min((*each.shape, *each.stride, each.start)) >= 0
        assert each.start + elements * getattr(torch, each.dtype).itemsize <= size


def test_a_storage_of_before_that_lies_about_its_size() -> None:
    at = LEGACY.rindex(struct.pack("<q", 4) + torch.ones(4, dtype=torch.int16).numpy().tobytes())
    for count in (3, 5, 2**40, 2**63):
        altered = LEGACY[:at] + struct.pack("<Q", count) + LEGACY[at + 8 :]
        with pytest.raises(FormatError):
            read_torch_file(altered)


def test_a_list_of_storages_that_are_not_named_by_text_is_refused() -> None:
    at = LEGACY.rindex(b"\x80\x02]")
    keys = pickle.loads(LEGACY[at:])
    numbers = pickle.dumps([int(key) for key in keys], 2)
    altered = LEGACY[:at] + numbers + LEGACY[at + len(pickle.dumps(keys, 2)) :]
    with pytest.raises(FormatError, match="list of storages"):
        read_torch_file(altered)


def safetensors_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[Any], *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""The codes of dtypes in safetensors."""


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header whose arrays lie end to end, listed in any order, and the size of their bytes."""
    header = {}
    at = 0
    for name in draw(st.lists(st.text(max_size=8), unique=True, max_size=6)):
        code = draw(st.sampled_from(sorted(CODES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        size = int(np.prod(shape, dtype=np.int64)) * CODES[code].itemsize
        header[name] = entry(code, shape, at, at + size)
        at += size
    names = draw(st.permutations(list(header)))
    return {name: header[name] for name in names}, at


@given(layouts(), st.integers(0, 7))
def test_arrays_of_safetensors_lie_where_the_header_says(
    layout: tuple[dict[str, Any], int], spaces: int
) -> None:
    header, size = layout
    text = json.dumps(header).encode() + b" " * spaces
    read = read_header(part_of(safetensors_of(text, bytes(size))))
    assert list(read.arrays) == list(header)
    for name, array in read.arrays.items():
        assert str(CODES[header[name]["dtype"]]) == f"torch.{array.dtype}"
        assert list(array.shape) == header[name]["shape"]
        assert array.start == 8 + len(text) + header[name]["data_offsets"][0]
        contiguous = torch.empty(array.shape, device="meta").stride()
        assert not array.shape or 0 in array.shape or array.stride == contiguous


@given(layouts(), st.data())
def test_an_altered_safetensors_file_is_refused_or_stays_within_itself(
    layout: tuple[dict[str, Any], int], draw: st.DataObject
) -> None:
    header, size = layout
    altered = bytearray(safetensors_of(header, bytes(size)))
    altered[draw.draw(st.integers(0, len(altered) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(FormatError):
        assert_within(dict(read_header(part_of(bytes(altered))).arrays), len(altered))
    cut = draw.draw(st.integers(0, len(altered) - 1))
    with pytest.raises(FormatError):
        read_header(part_of(bytes(safetensors_of(header, bytes(size))[:cut])))


GOOD = entry("F32", [2], 0, 8)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100_000_001) + b"{}",
        struct.pack("<Q", 3) + b"{}",
        safetensors_of(b""),
        safetensors_of(b"[]"),
        safetensors_of(b"null"),
        safetensors_of(b"\xff{}"),
        safetensors_of(b"[" * 100_000),
        safetensors_of(b'{"a":' * 100_000),
        safetensors_of({"a": None}),
        safetensors_of({"a": GOOD}, bytes(7)),
        safetensors_of({"a": GOOD}, bytes(9)),
        safetensors_of({"a": GOOD, "b": GOOD}, bytes(8)),
        safetensors_of({"a": GOOD, "b": entry("F32", [1], 4, 8)}, bytes(8)),
        safetensors_of({"a": GOOD, "b": entry("F32", [1], 12, 16)}, bytes(16)),
        safetensors_of({"a": entry("F32", [2], 8, 0)}, bytes(8)),
        safetensors_of({"a": entry("F32", [2], -8, 0)}, bytes(8)),
        safetensors_of({"a": entry("F32", [2], 0, 8, 8)}, bytes(8)),
        safetensors_of({"a": entry("F32", [2], 0, 8.5)}, bytes(8)),
        safetensors_of({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        safetensors_of({"a": entry("F32", [-2], 0, 8)}, bytes(8)),
        safetensors_of({"a": entry("F32", [True], 0, 4)}, bytes(4)),
        safetensors_of({"a": entry("F32", [2**62, 0], 0, 8)}, bytes(8)),
        safetensors_of({"a": entry("F32", [2**63], 0, 8)}, bytes(8)),
        safetensors_of({"a": entry("F32", [1] * 65, 0, 4)}, bytes(4)),
        safetensors_of({"a": {**GOOD, "run": "rm"}}, bytes(8)),
        safetensors_of({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
        safetensors_of({"a": GOOD, "__metadata__": {"a": 1}}, bytes(8)),
        safetensors_of({"a": GOOD, "__metadata__": []}, bytes(8)),
    ],
)
def test_a_hostile_header_is_refused(data: bytes) -> None:
    assert read_header(part_of(safetensors_of({"a": GOOD}, bytes(8)))).arrays
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="it"):
            read_header(part_of(data))
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def test_an_archive_over_4_gib_is_read(tmp_path: Path) -> None:
    """Only its ends are written: the file has a hole of 5 GiB."""
    data, name = 5 << 30, b"archive/data/0"
    entries = {k: v for k, v in entries_of(ZIPPED).items() if k != name.decode()}
    storage = (
        b"(X\x07\x00\x00\x00storagectorch\nByteStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
    )
    count = b"\x8a\x05" + data.to_bytes(5, "little") + b"tQ."
    small = packed({**entries, "archive/data.pkl": storage + count})
    end = end_of(small)
    _, _, _, _, count, size, start, _ = struct.unpack("<4sHHHHIIH", small[end:])
    wide = struct.pack("<HHQQ", 1, 16, data, data)
    local_header = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", *(0,) * 6, *(2**32 - 1,) * 2, 14, 20)
    at = start
    after = at + len(local_header) + len(name) + len(wide) + data
    listed = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", *(0,) * 7, *(2**32 - 1,) * 2, 14, 28, *(0,) * 4, at
    )
    extra = struct.pack("<HHQQQ", 1, 24, data, data, at)
    listed = listed[:-4] + struct.pack("<I", 2**32 - 1)
    directory = small[start : start + size] + listed + name + extra
    end64 = struct.pack(
        "<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count + 1, count + 1, len(directory), after
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, after + len(directory), 1)
    full = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, *(2**16 - 1,) * 2, *(2**32 - 1,) * 2, 0)
    path = tmp_path / "large.pt"
    with open(path, "wb") as file:
        file.write(small[:start] + local_header + name + wide)
        file.seek(after)
        file.write(directory + end64 + locator + full)
    found = FileTree(tmp_path).load("large.pt")
    assert (found.start, found.shape) == (after - data, (data,))


def test_one_wide_tensor_does_not_make_a_table_of_gigabytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows of the table are as wide as the widest tensor."""
    state = {f"x{i}": torch.zeros(1) for i in range(20)} | {"wide": torch.zeros([1] * 64)}
    torch.save({"model": state}, tmp_path / "wide.pt")
    safetensors.torch.save_file(state, tmp_path / "wide.safetensors")
    monkeypatch.setattr("shardwise.kernel.boxes.box.MOST_INTEGERS", 21 * 64 - 1)
    for name in ("wide.pt", "wide.safetensors"):
        with pytest.raises(FormatError, match="21 pieces or tensors of up to 64 dimensions"):
            sw.open(tmp_path / name)
    monkeypatch.setattr("shardwise.kernel.boxes.box.MOST_INTEGERS", 21 * 64)
    assert len(sw.open(tmp_path / "wide.pt")) == 21
