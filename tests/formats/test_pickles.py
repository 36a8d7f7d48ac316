"""Pickles give the values that were put into them, of a closed list of types."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import pickle
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.parts.formats.reader import FileTree, FormatError, PickledInstance, UnknownObject

PROTOCOLS = range(2, 6)


def unpickle(data: bytes, *classes: str, skip_unknown: bool = False) -> Any:
    """The value of a pickle in a file."""
    with TemporaryDirectory() as folder:
        Path(folder, "it").write_bytes(data)
        return FileTree(folder, skip_unknown=skip_unknown).load_pickle("it", classes=classes)


class Colour(enum.Enum):
    """Of a library that is not installed here."""

    RED = 7


class Strange:
    """Of such a library, too."""

    def __init__(self) -> None:
        self.inner = {"a": 1}


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.text("é", min_size=200, max_size=300)
    | st.binary(max_size=20)
    | st.binary(min_size=250, max_size=260)
)
KEYS = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    lists, dicts = st.lists(inner, max_size=5), st.dictionaries(KEYS, inner, max_size=5)
    sets = st.frozensets(KEYS, max_size=5)
    ordered = dicts.map(collections.OrderedDict)
    return lists | lists.map(tuple) | dicts | ordered | sets | sets.map(set)


def same(a: object, b: object) -> bool:
    """Whether values are equal in all they are made of; sets have no order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b and (isinstance(a, (set, frozenset)) or repr(a) == repr(b))


@given(st.recursive(SCALARS, containers, max_leaves=20), st.sampled_from(PROTOCOLS))
def test_plain_values_are_as_they_were(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert same(unpickle(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (bytearray(b"ab"), bytearray(b"ab")),
        (slice(1, None), slice(1, None)),
        (range(3), range(3)),
        (collections.Counter("aab"), collections.Counter("aab")),
        (collections.deque([1, 2]), [1, 2]),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        (datetime.datetime(2026, 1, 2, 3, 4, 5, 6), "2026-01-02T03:04:05.000006"),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.timedelta(1, 2), 86402.0),
        (PurePosixPath("/a/b"), "/a/b"),
        (PurePosixPath("a", "b"), "a/b"),
    ],
)
def test_values_of_the_standard_library(value: object, expected: object, protocol: int) -> None:
    read = unpickle(pickle.dumps(value, protocol))
    assert type(read) is type(expected)
    assert read == expected


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="f8").reshape(2, 3),
        np.arange(6, dtype="i2").reshape(2, 3).T,
        np.array(5, "u1"),
        np.zeros((0, 3), "c8"),
        np.float32(2.5),
        np.bool_(True),
    ],
)
def test_arrays_of_numpy(array: np.ndarray | np.generic, protocol: int) -> None:
    read = unpickle(pickle.dumps(array, protocol))
    assert type(read) is type(array)
    assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_instances_of_classes_on_the_list_become_pickled_instances() -> None:
    data = pickle.dumps([argparse.Namespace(lr=0.1), Strange(), Colour.RED, Colour], 4)
    names = [f"{__name__}.{kind.__name__}" for kind in (Strange, Colour)]
    space, strange, red, colour = unpickle(data, *names)
    assert isinstance(space, PickledInstance)
    assert space.fields == {"lr": 0.1}
    assert isinstance(strange, PickledInstance)
    assert (strange.name, strange.fields) == (names[0], {"inner": {"a": 1}})
    assert isinstance(red, PickledInstance)
    assert (red.name, red.args) == (names[1], (7,))
    assert colour.name == names[1]


def test_a_member_by_its_name_is_a_pickled_instance() -> None:
    data = b"cbuiltins\ngetattr\ncsome\nKind\nX\x03\x00\x00\x00RED\x86R."
    red = unpickle(data, "some.Kind")
    assert (red.name, red.args) == ("some.Kind", ("RED",))
    assert unpickle(data, skip_unknown=True) == UnknownObject("some.Kind")


def test_what_is_not_on_the_list_is_named_all_of_it() -> None:
    data = pickle.dumps({"a": Strange(), "b": [Colour.RED], "c": 1})
    with pytest.raises(FormatError, match=r"it: .*\.Colour, .*\.Strange"):
        unpickle(data)
    strange, red = UnknownObject(f"{__name__}.Strange"), UnknownObject(f"{__name__}.Colour")
    assert unpickle(data, skip_unknown=True) == {"a": strange, "b": [red], "c": 1}
