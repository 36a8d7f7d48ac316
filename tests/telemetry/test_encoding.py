"""Telemetry as a file: what is written is read, and anything else is refused."""

from __future__ import annotations

import base64
import gzip
import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.errors import FormatError
from shardwise.parts.telemetry.encoding import decode, decode_file, encode, encode_file
from shardwise.parts.telemetry.records import StageColumns
from tests.telemetry.tables import same, table_of

Document = dict[str, Any]


def document() -> Document:
    """Return a valid document of four ranks."""
    found: Document = json.loads(encode(table_of(range(4), 8)))
    return found


def encoded(fields: Document) -> bytes:
    return gzip.compress(json.dumps(fields).encode())


def test_a_file_has_the_documented_keys() -> None:
    found = json.loads(gzip.decompress(encode_file(table_of(range(3), 4))))
    assert (found["format"], found["version"]) == ("shardwise-telemetry", 1)
    assert found["ranks"] == [0, 1, 2]
    assert (found["hosts"], found["host"]) == (["host-0"], [0, 0, 0])
    assert (found["axes"], found["coordinates"]) == (
        ["pp", "dp", "tp"],
        [[0, 0, 0], [0, 0, 1], [0, 1, 0]],
    )
    plan, write = found["stages"]
    assert plan["file"] == [None]  # one null if there are no files
    assert write == {
        "name": "write", "start": [1000, -1, 1002], "duration": [10**6, 0, 10**6 + 26],
        "bytes": [2**30, 0, 2**30 + 2], "retries": [0, 0, 2], "waited": [0, 0, 0],
        "file": [f"r00000-{'ab' * 8}.safetensors", None, f"r00002-{'ab' * 8}.safetensors"],
    }  # fmt: skip


@pytest.mark.parametrize("ranks", [range(1), range(1, 2), range(5), range(3, 100, 3)])
def test_what_is_written_is_read(ranks: range) -> None:
    table = table_of(ranks, 128)
    assert same(decode_file(encode_file(table), "here"), table)


def test_a_rank_needs_a_few_hundred_bytes() -> None:
    ranks, stages = 16_384, 6
    table = table_of(range(ranks), ranks)
    write = table.stages[1]
    columns = write.start, write.duration, write.bytes, write.retries, write.waited, write.file
    more = tuple(StageColumns(f"stage-{each}", *columns) for each in range(stages - 2))
    table = table_of(range(ranks), ranks, stages=(*table.stages, *more))
    assert len(encode(table)) < 500 * ranks
    assert len(encode_file(table)) < 100 * ranks


def test_unknown_keys_are_ignored() -> None:
    fields = document()
    fields["new"] = {"of": "a later version"}
    fields["stages"][0]["new"] = [1, 2]
    assert same(decode_file(encoded(fields), "here"), table_of(range(4), 8))


def test_when_ranks_began_may_be_missing() -> None:
    fields = document()
    del fields["began"]
    assert decode_file(encoded(fields), "here").began.tolist() == [0, 0, 0, 0]


def set_stage(key: str, value: object) -> Callable[[Document], object]:
    return lambda fields: fields["stages"][1].__setitem__(key, value)


def put(key: str, value: object) -> Callable[[Document], object]:
    return lambda fields: fields.__setitem__(key, value)


DAMAGE = {
    "a column that is too short": put("host", [0, 0, 0]),
    "a column that is too long": put("clock", [0] * 5),
    "text in a column": put("clock", [0, 1, "2", 3]),
    "a fraction": put("clock", [0, 1, 2.5, 3]),
    "a huge number": put("clock", [0, 1, 2, 10**30]),
    "a nested column": put("clock", [0, 1, [2], 3]),
    "no column": put("clock", None),
    "no ranks": put("ranks", []),
    "a rank out of the world": put("ranks", [0, 1, 2, 8]),
    "a rank twice": put("ranks", [0, 1, 1, 3]),
    "a negative rank": put("ranks", [-1, 1, 2, 3]),
    "a host that is not listed": put("host", [0, 0, 0, 1]),
    "a negative host": put("host", [0, 0, 0, -1]),
    "more hosts than ranks": put("hosts", ["a"] * 5),
    "a host with a strange name": put("hosts", ["a<script>"]),
    "no world": put("world_size", 0),
    "a huge world": put("world_size", 2**40),
    "fewer coordinates than axes": put("coordinates", [[0, 0, 0, 0]]),
    "too many axes": put("axes", ["a"] * 17),
    "a negative duration": set_stage("duration", [0, 0, 0, -1]),
    "a start before the operation": set_stage("start", [0, 0, 0, -2]),
    "a stage without a column": lambda fields: fields["stages"][0].pop("waited"),
    "a file in another directory": set_stage("file", ["a,b", None, None, None]),
    "a file of nobody": set_stage("file", ["a"]),
    "too few files": set_stage("file", ["a", None]),
    "too many stages": lambda fields: put("stages", fields["stages"] * 129)(fields),
    "negative seconds": put("seconds", -1.0),
    "no time": put("started", None),
    "phases that are no numbers": put("phases", {"read": "long"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_document_is_refused(damage: Callable[[Document], object]) -> None:
    fields = document()
    damage(fields)
    with pytest.raises(FormatError, match=r"run/telemetry\.json\.gz: the telemetry is damaged: .+"):
        decode_file(encoded(fields), "run/telemetry.json.gz")


@pytest.mark.parametrize("key", ["format", "version"])
def test_another_format_is_named(key: str) -> None:
    fields = {**document(), key: 7 if key == "version" else "other"}
    with pytest.raises(FormatError, match="install a newer version"):
        decode_file(encoded(fields), "here")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"{}",
        gzip.compress(b"[1]", mtime=0),
        gzip.compress(b'{"a":' * 10**5, mtime=0),
    ],
    ids=["empty", "zeros", "not compressed", "a list", "deeply nested"],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="here: the telemetry "):
        decode_file(data, "here")


def test_every_cut_is_noticed() -> None:
    data = encode_file(table_of(range(4), 8))
    for end in range(len(data)):
        with pytest.raises(FormatError, match="damaged"):
            decode_file(data[:end], "here")


@given(st.data())
def test_flipped_bits_raise_nothing_else(data: st.DataObject) -> None:
    text = bytearray(encode(table_of(range(4), 8)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at] = data.draw(st.integers(0, 255))
    with suppress(FormatError):
        decode(bytes(text), "here")


@pytest.mark.parametrize(
    "text",
    [
        b" " * 2**28,
        json.dumps({**document(), "clock": [0] * 2**22}).encode(),
        json.dumps({**document(), "hosts": ["a"] * 2**22}).encode(),
    ],
    ids=["spaces", "numbers", "hosts"],
)
def test_a_small_file_cannot_take_much_memory(text: bytes) -> None:
    data = gzip.compress(text, 9)
    del text
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="damaged"):
            decode_file(data, "here")
        assert tracemalloc.get_traced_memory()[1] < 2**28 + 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.long
def test_long_names_of_files_are_bounded() -> None:
    n = 530_000
    table = table_of(range(n), n)
    fields = json.loads(encode(table))
    fields["stages"][1]["file"] = ["a" * 255, *[None] * (n - 1)]
    with pytest.raises(FormatError, match="names of files are too long"):
        decode(json.dumps(fields).encode(), "here")
    assert np.array_equal(table.ranks, np.arange(n))


VERSION_1 = """
H4sIAAAAAAAAA42SwXLjIAyG34Xryo7AYKd+jr1lMh0Sk8ZTx3iANNtm8u4r5LQb7+6h8RCQ9Al+Ca7i4MPJJtGKeLShu/TR
FckN7uRSeBcg3lyIvR9FK0H4yQWb2BLRvjkK9x2t7W75kT8mN1EOIojJpiNBq3Ae48qucqTA/KMokzYkl7dRqOpCykI1P1G3
aFqsSwabH4jtDLu9H7tIO5cGDYiLD0P3HPsPJ9o1iKHfBUuyWyFLVVaUEOz4SvgGQYKCCjSYLYijjyl7eVGguLuY+/rIaX85
xqaJturyX5oyvPc+dP1oE4eXSWxJPk6xJeE+tjlz8PtXyik0QqEqKGqQhK5BZ10792JHVlFBDU8gFcjspx698FFXMdoT1Sqm
gcB788ifGy2RTkXKwIqGppFTu/PnlW0MgpFgFJgKDDWCT3yfa1jWfegHOmQznoeBrEBPof8PdbE9Xxy5G5AaFBdSme0NvnRe
AjFLoVR4FkpK51nTvBQq+da5j3lW9eeKtOODaIlN1Wi5VpqBu1E/GuvHekTgfYu/32sZ7cElN0YfooBcNcyo+j6qv4H+00s1
P41lL/+0+EaB6Whj5q+UagkwpbndfgNnlKh8tgMAAA==
"""
"""A file as it was written on 27 November 2026."""


def test_version_1_stays_readable() -> None:
    assert same(decode_file(base64.b64decode(VERSION_1), "golden"), table_of(range(6), 8))
