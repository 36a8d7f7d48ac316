"""Names as a tree, numbers and values as words: what `shardwise inspect` prints of them."""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import shardwise as sw
from tests.breadth import examples
from tests.cli.conftest import Run
from tests.commands import run_command
from tests.manifest.documents import document_of, sealed

LINES = "├└│ "
WIDEST_VALUE = 160


def rows_of(place: Path, *options: str) -> list[str]:
    """The rows of the tree that `inspect` prints, without the header."""
    ran = run_command("inspect", place, *options)
    assert ran.status == 0, ran.err
    return [line.rstrip() for line in ran.out.partition("\n\n")[2].splitlines() if line]


def tree_of(place: Path, sizes: dict[str, int], *options: str) -> list[str]:
    """Save tensors of these names and sizes; the rows of their tree, without columns."""
    sw.save(place, {name: torch.zeros(size) for name, size in sizes.items()})
    return [re.split(r"  +", row)[0] for row in rows_of(place, *options)]


def test_numbered_siblings_that_are_alike_become_one(run: Run, tmp_path: Path) -> None:
    sizes = {f"layers.{i}.{part}": 2 for i in range(12) for part in ("w", "b")}
    assert tree_of(tmp_path / "a", sizes) == ["layers.0…11", "├── w", "└── b"]
    assert rows_of(tmp_path / "a")[0].endswith(" 12 × 16 B")
    assert len(rows_of(tmp_path / "a", "--all")) == 1 + 12 * 3


def test_those_that_differ_stay_apart(run: Run, tmp_path: Path) -> None:
    sizes = {f"{i}.w": 3 if i == 2 else 2 for i in range(5)}
    assert tree_of(tmp_path / "a", sizes) == ["0…1, 3…4.w", "2.w"]


def test_what_alternates_is_two_groups(run: Run, tmp_path: Path) -> None:
    sizes = {f"layers.{i}.w": 1 + i % 2 for i in range(6)}
    assert tree_of(tmp_path / "a", sizes) == ["layers", "├── 0, 2…4.w", "└── 1, 3…5.w"]


def test_groups_within_groups_keep_their_sizes(run: Run, tmp_path: Path) -> None:
    sizes = {f"l.{i}.e.{j}.w": 1 for i in range(3) for j in range(4)}
    assert tree_of(tmp_path / "a", sizes) == ["l.0…2", "└── e.0…3.w"]
    assert [row.split("  ")[-1].strip() for row in rows_of(tmp_path / "a")] == [
        "3 × 16 B",
        "4 × 4 B",
    ]


def test_a_name_may_hold_something_and_have_names_below(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"a": 1, "a.b": torch.zeros(2)})
    assert [row.split() for row in rows_of(tmp_path / "a")] == [
        ["a", "1"],
        ["└──", "b", "float32", "[2]", "8", "B"],
    ]


def test_a_name_of_very_many_parts_is_shown(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {".".join("x" * 2000): torch.zeros(1)})
    assert run("inspect", tmp_path / "a").out.count("x") >= 2000


@examples(12)
@given(st.lists(st.text("ab01", min_size=1, max_size=4), max_size=4), st.data())
def test_no_leaf_is_lost(parts: list[str], data: st.DataObject) -> None:
    words = st.sampled_from([*parts, "a", "0", "1"])
    drawn = st.lists(words, min_size=1, max_size=4).map(".".join)
    names = data.draw(st.lists(drawn, unique=True, min_size=1, max_size=8))
    with TemporaryDirectory() as folder:
        place = Path(folder, "a")
        tree_of(place, dict.fromkeys(names, 2))
        listed = rows_of(place, "--all")
        assert sum("float32" in row for row in listed) == len(names)
        for rows in (listed, rows_of(place)):
            tops = [
                re.search(r"(?:(\d+) × )?(\d+) B$", row) for row in rows if row[0] not in "├└│ "
            ]
            assert sum(int(top[1] or 1) * int(top[2]) for top in tops if top) == 8 * len(names)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3, 4], "3…4"),
        ([0, 1, 2, 3], "0…3"),
        ([0, 2, 4, 6], "0, 2…6"),
        ([0, 1, 2, 5, 7, 8], "0…2, 5, 7…8"),
    ],
)
def test_indices_are_short(run: Run, tmp_path: Path, numbers: list[int], text: str) -> None:
    assert tree_of(tmp_path / "a", {f"{i}.w": 1 for i in numbers}) == [f"{text}.w"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.50 KiB"),
        (250 << 20, "250 MiB"),
        (12 << 40, "12.0 TiB"),
    ],
)
def test_sizes_are_short(run: Run, tmp_path: Path, nbytes: int, text: str) -> None:
    entry = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "holes.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + nbytes)
    (row,) = rows_of(path)
    assert re.split(r"  +", row)[-1] == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        ("it's", '"it\'s"'),
        ("\x1b[31m", "'\\x1b[31m'"),
        ([1, 2], "[1, 2]"),
        (list(range(9)), "[0, 1, 2, 3, … 5 more]"),
        ((1,), "(1,)"),
        ([{"a": (1, "b")}], "[{'a': (1, 'b')}]"),
        ({1: 2}, "{1: 2}"),
        ([OrderedDict(a=1)], "[{'a': 1}]"),
        (float("inf"), "inf"),
        (2**70, str(2**70)),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cpu"), "cpu"),
        (b"123", "bytes of 3 B"),
        (torch.Size([2]), "size([2])"),
        ([[[[[1]]]]], "[[[[…]]]]"),
    ],
)
def test_values_are_short(run: Run, tmp_path: Path, value: object, text: str) -> None:
    sw.save(tmp_path / "a", {"v": value})
    (row,) = rows_of(tmp_path / "a")
    assert row.split(maxsplit=1) == ["v", text]


def replace_value(place: Path, encoded: object) -> None:
    """Write another value into the manifest, as docs/format.md encodes it."""
    document = document_of(place)
    document["objects"][0]["value"] = encoded
    (place / "manifest.json").write_bytes(sealed(document))


def test_a_tensor_within_a_value_is_described(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"v": 7})
    bits = base64.b64encode(bytes(24)).decode()
    replace_value(tmp_path / "a", {"$": "tensor", "dtype": "float32", "shape": [2, 3], "v": bits})
    (row,) = rows_of(tmp_path / "a")
    assert row.split(maxsplit=1) == ["v", "tensor float32 [2, 3]"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$"), inner),
)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_no_value_is_too_strange_to_be_shown(tmp_path: Path, value: object) -> None:
    """Nor is what is no encoding of a value, in the manifest of somebody else."""
    if not (tmp_path / "a").exists():
        sw.save(tmp_path / "a", {"v": 7})
    replace_value(tmp_path / "a", json.loads(json.dumps(value).replace("Infinity", "1e300")))
    (row,) = rows_of(tmp_path / "a")
    assert len(row) <= len("v   ") + WIDEST_VALUE
    assert row.isprintable()
