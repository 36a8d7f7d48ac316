"""Values as a hostile file has them: never more than a value or a StateError."""

from __future__ import annotations

import contextlib
import enum
import pickle
import sys
from base64 import b64encode
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.errors import FormatError, StateError
from shardwise.ports.binding import decode
from tests.breadth import examples


class Colour(enum.Enum):
    RED = 1


tags = st.sampled_from(["tensor", "array", "numpy", "enum", "tuple", "size", "dict", "ordered"])
tags |= st.sampled_from(["counter", "int", "float", "complex", "bytes", "bytearray"])
tags |= st.sampled_from(["dtype", "device", "pickle", "unknown"])
words = st.sampled_from(["", "AAAA", "float32", "qint8", "bits8", "_dynamo", "9" * 5000, "nan"])
words |= st.sampled_from(["<f4", "|O", "(,)f4", "f4,f4", "cuda:-1", "é", "\ud800"])
words |= st.sampled_from(["os:system", "builtins:eval", "enum:Enum"])
numbers = st.integers(-2, 3) | st.sampled_from([2**31, 2**62, 2**63, 2**70])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=2),
        st.fixed_dictionaries(
            {"$": tags | inner},
            optional={
                "v": inner,
                "dtype": words | inner,
                "shape": st.lists(numbers, max_size=3) | inner,
                "class": words,
                "name": words,
            },
        ),
    ),
    max_leaves=10,
)


@examples(400)
@given(json_values)
def test_whatever_a_file_says_is_a_value_or_a_clear_error(encoded: object) -> None:
    with contextlib.suppress(StateError):
        decode(encoded, "value", lambda name: torch.zeros(1))


def in_lists(depth: int) -> object:
    value: object = None
    for _ in range(depth):
        value = [value]
    return value


def test_a_file_nested_too_deep_is_refused() -> None:
    for encoded in (in_lists(201), in_lists(5000), {"a": in_lists(5000)}):
        with pytest.raises(StateError, match="more than 200 levels deep"):
            decode(encoded, "value")


class _Attack:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Attack, "ran", True)


def test_a_pickle_in_a_file_does_not_run() -> None:
    data = {"$": "pickle", "v": b64encode(pickle.dumps(_Attack())).decode()}
    with pytest.raises(StateError):
        decode(data, "value")
    assert not _Attack.ran


def test_an_enum_is_found_only_if_it_is_imported_and_an_enum() -> None:
    for place in ("nowhere:Colour", f"{__name__}:_Attack", "os:environ", f"{__name__}:Colour.RED"):
        with pytest.raises(StateError, match="import its module before the load, or leave"):
            decode({"$": "enum", "class": place, "v": "RED"}, "value")
    with pytest.raises(StateError, match=r"'MAUVE' of the enum .*Colour, which has no such member"):
        decode({"$": "enum", "class": f"{__name__}:Colour", "v": "MAUVE"}, "value")


def test_a_dtype_is_looked_up_and_nothing_is_imported_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    with pytest.raises(StateError, match="no dtype"):
        decode({"$": "dtype", "v": "a_module_that_torch_imports_when_asked"}, "value")
    assert asked == []


def test_errors_of_the_caller_s_storage_are_not_taken_for_malformed_values() -> None:
    def broken(name: str) -> torch.Tensor:
        raise FormatError(f"{name}: damaged")

    with pytest.raises(FormatError):
        decode({"$": "tensor", "name": "x"}, "x", broken)


def test_lying_lengths_are_refused_before_memory_is_taken() -> None:
    for shape in ([2**60], [2**40, 2**40], [0, 2**62], [1] * 65, [-1], [1.5], [True], ["1"]):
        for kind, dtype in (("tensor", "float32"), ("array", "<f4")):
            with pytest.raises(StateError, match=r"^value: the saved (tensor|array) is invalid"):
                decode({"$": kind, "dtype": dtype, "shape": shape, "v": "AAAAAA=="}, "value")


def test_keys_with_one_hash_are_refused() -> None:
    pairs = [[{"$": "int", "v": str(i * sys.hash_info.modulus)}, 0] for i in range(1, 67)]
    with pytest.raises(StateError, match="more than 64 keys have the same hash"):
        decode({"$": "dict", "v": pairs}, "value", lambda name: torch.zeros(1))
    assert len(decode({"$": "dict", "v": pairs[:64]}, "value", lambda name: torch.zeros(1))) == 64  # type: ignore[arg-type]
