"""Names as a tree, numbers and values as words."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli import formatting as fmt
from shardwise.cli.name_tree import NameLeaf, NameNode, build_tree, list_rows
from shardwise.state.plain_values import encode


def tensor(name: str, *shape: int) -> NameLeaf:
    return NameLeaf(name, "", "float32", shape, 4)


def labels(nodes: list[NameNode]) -> list[str]:
    return [f"{prefix}{node.label} ×{node.count}" for prefix, node in list_rows(nodes)]


def test_numbered_siblings_that_are_alike_become_one() -> None:
    names = [tensor(f"layers.{i}.{part}", 2) for i in range(12) for part in ("w", "b")]
    assert labels(build_tree(names, collapse=True)) == ["layers.0…11 ×12", "├── w ×1", "└── b ×1"]
    assert len(labels(build_tree(names, collapse=False))) == 1 + 12 * 3


def test_those_that_differ_stay_apart() -> None:
    names = [tensor(f"{i}.w", 3 if i == 2 else 2) for i in range(5)]
    assert labels(build_tree(names, collapse=True)) == ["0…1, 3…4.w ×4", "2.w ×1"]


def test_what_alternates_is_two_groups() -> None:
    names = [tensor(f"layers.{i}.w", 1 + i % 2) for i in range(6)]
    assert labels(build_tree(names, collapse=True)) == [
        "layers ×1",
        "├── 0, 2…4.w ×3",
        "└── 1, 3…5.w ×3",
    ]


def test_groups_within_groups_keep_their_sizes() -> None:
    names = [tensor(f"l.{i}.e.{j}.w", 1) for i in range(3) for j in range(4)]
    (node,) = build_tree(names, collapse=True)
    assert node.nbytes == 4 * 12
    assert (node.label, node.count) == ("l.0…2", 3)
    assert [child.label for child in node.children.values()] == ["e.0…3.w"]


def test_a_name_may_hold_something_and_have_names_below() -> None:
    nodes = build_tree([NameLeaf("a", "1"), tensor("a.b", 2)], collapse=True)
    assert labels(nodes) == ["a ×1", "└── b ×1"]


def test_a_name_of_very_many_parts_is_shown() -> None:
    (node,) = build_tree([tensor(".".join("x" * 2000), 1)], collapse=True)
    assert node.label.count("x") == 2000


@given(st.lists(st.text("ab.01", min_size=1, max_size=8), unique=True), st.booleans())
def test_no_leaf_is_lost(names: list[str], collapse: bool) -> None:
    nodes = build_tree([tensor(name, 2) for name in names], collapse=collapse)
    assert sum(node.nbytes for node in nodes) == 4 * len(names)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "3"),
        ([0, 1, 2, 3], "0…3"),
        ([0, 2, 4, 6], "0, 2…6"),
        ([0, 1, 2, 5, 7, 8], "0…2, 5, 7…8"),
    ],
)
def test_indices_are_short(numbers: list[int], text: str) -> None:
    assert fmt.indices(numbers) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1000 B"),
        (1536, "1.50 KiB"),
        (250 << 20, "250 MiB"),
        (12 << 40, "12.0 TiB"),
    ],
)
def test_sizes_are_short(nbytes: int, text: str) -> None:
    assert fmt.size(nbytes) == text


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
        ({"a": (1, "b")}, "{'a': (1, 'b')}"),
        ({1: 2}, "{1: 2}"),
        (OrderedDict(a=1), "{'a': 1}"),
        (float("inf"), "inf"),
        (2**70, str(2**70)),
        (torch.bfloat16, "bfloat16"),
        (torch.device("cpu"), "cpu"),
        (b"123", "bytes of 3 B"),
        (torch.ones(2, 3), "tensor float32 [2, 3]"),
        (torch.Size([2]), "size([2])"),
        ([[[[[1]]]]], "[[[[…]]]]"),
    ],
)
def test_values_are_short(value: object, text: str) -> None:
    assert fmt.value(encode(value, "value")) == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("$"), inner),
)


@given(JSON)
def test_no_value_is_too_strange_to_be_shown(value: object) -> None:
    text = fmt.value(value)
    assert len(text) <= fmt.MAX_VALUE
    assert text.isprintable()
