"""Plain values to JSON and back: exact, and safe whatever the file says."""

from __future__ import annotations

import enum
import math
import pickle
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from shardwise.errors import StateError
from shardwise.state.objects import decode, differences, encode


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 0


@dataclass
class Settings:
    rate: float


class Pair(NamedTuple):
    left: int
    right: int


def round_trip(value: object, **options: bool) -> Any:
    """Through real JSON bytes."""
    encoded = msgspec.json.decode(msgspec.json.encode(encode(value, "value", **options)))
    return decode(encoded, "value", **options)


def same(a: object, b: object) -> bool:
    """Equal in type and value, NaN and the sign of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, dict) and isinstance(b, dict):
        pairs = zip(a.items(), b.items(), strict=True) if len(a) == len(b) else [((0, 0), (1, 0))]
        return all(same(x[0], y[0]) and same(x[1], y[1]) for x, y in pairs)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    text,
    st.binary(max_size=8),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Colour.RED, Colour.BLUE, Level.LOW, torch.float8_e5m2, torch.device("cpu")]),
)
keys = st.one_of(text, st.integers(), st.booleans(), st.tuples(st.integers(), text))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(text | st.just("$"), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(text, inner, max_size=3).map(OrderedDict),
        st.dictionaries(text, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@given(values)
def test_values_come_back_as_they_were(value: object) -> None:
    assert same(round_trip(value), value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$", "v", "dtype", "shape", "class", "name", "x"]),
            inner
            | st.sampled_from(
                ["tensor", "array", "enum", "numpy", "dict", "counter", "tuple", "size"]
            )
            | st.sampled_from(["int", "float", "complex", "bytes", "dtype", "device", "pickle"])
            | st.sampled_from(["float32", "<f4", "|O", "AAAA", "os:system", "builtins:eval"]),
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(json_values)
def test_whatever_a_file_says_is_a_value_or_a_clear_error(encoded: object) -> None:
    try:
        decode(encoded, "value", lambda name: torch.zeros(1))
    except StateError:
        pass


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "complex64"])
def test_tensors_are_stored_inline_bit_for_bit(dtype: str) -> None:
    tensor = torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3).t()
    back = round_trip(tensor)
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))


def test_arrays_and_numpy_scalars_keep_their_types() -> None:
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    back = round_trip([array, np.float32(0.1), np.bool_(True)])
    assert back[0].dtype == array.dtype
    assert (back[0] == array).all()
    assert type(back[1]) is np.float32
    assert back[1] == np.float32(0.1)
    assert type(back[2]) is np.bool_


def test_tensors_can_be_stored_elsewhere() -> None:
    found: dict[str, Any] = {}
    tensor, array = torch.ones(2), np.zeros(3)
    encoded = encode({"a": [tensor], "b": {1: array}}, "x", found.__setitem__)
    assert set(found) == {"x.a.0", "x.b.1"}
    back = decode(encoded, "x", lambda name: torch.as_tensor(found[name]))
    assert back["a"][0] is tensor  # type: ignore[index]
    assert isinstance(back["b"][1], np.ndarray)  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Settings(0.1), "asdict"),
        ({1, 2}, "sorted"),
        (Pair(1, 2), "_asdict"),
        (object(), "state_dict"),
        (lambda: 0, "allow_pickle"),
        (torch.Generator(), "get_state"),
        ("\ud800", "Unicode"),
        (np.array([object()]), "only numbers"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_name_with_a_hint(value: object, hint: str) -> None:
    with pytest.raises(StateError, match=r"state\.deep\.1") as refused:
        encode({"deep": [0, value]}, "state")
    assert hint in str(refused.value)


def test_what_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(StateError, match="within itself"):
        encode(value, "value")


def test_pickle_needs_consent_both_ways() -> None:
    with pytest.raises(StateError, match="asdict"):
        encode(Settings(0.5), "value")
    assert round_trip(Settings(0.5), allow_pickle=True) == Settings(0.5)
    encoded = encode(Settings(0.5), "value", allow_pickle=True)
    with pytest.raises(StateError, match="runs code"):
        decode(encoded, "value")


class _Attack:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Attack, "ran", True)


def test_a_pickle_in_a_file_does_not_run() -> None:
    data = {"$": "pickle", "v": __import__("base64").b64encode(pickle.dumps(_Attack())).decode()}
    with pytest.raises(StateError):
        decode(data, "value")
    assert not _Attack.ran


def test_an_enum_is_found_only_if_it_is_imported_and_an_enum() -> None:
    for place in ("nowhere:Colour", f"{__name__}:Settings", "os:environ", f"{__name__}:Colour.RED"):
        with pytest.raises(StateError):
            decode({"$": "enum", "class": place, "v": "RED"}, "value")


def test_lying_lengths_are_refused_before_memory_is_taken() -> None:
    for shape in ([2**60], [2**40, 2**40], [-1], [1.5], ["1"]):
        lie = {"$": "tensor", "dtype": "float32", "shape": shape, "v": "AAAA"}
        with pytest.raises(StateError):
            decode(lie, "value")


def _schedulers(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        lr_scheduler.StepLR(optimizer, 2),
        lr_scheduler.ExponentialLR(optimizer, 0.9),
        lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        lr_scheduler.PolynomialLR(optimizer, 5),
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.LinearLR(optimizer)],
            milestones=[3],
        ),
        lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 2)]),
    ]


@pytest.mark.parametrize("index", range(12))
def test_every_scheduler_of_torch_comes_back(index: int) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = _schedulers(optimizer)[index]
    for _ in range(5):
        optimizer.step()
        scheduler.step(*([1.0] if index == 9 else []))
    saved = scheduler.state_dict()
    back = round_trip(saved)
    assert same(back, dict(saved))
    scheduler.load_state_dict(back)


def test_a_grad_scaler_comes_back() -> None:
    saved = torch.amp.GradScaler("cpu").state_dict()
    assert same(round_trip(saved), saved)


def test_differences_are_named() -> None:
    assert differences({"a": [1, 2], "b": 1}, {"a": [1, 3], "c": 1}, "x") == [
        "x.a.1",
        "x.b",
        "x.c",
    ]
    assert differences(1, 1.0, "x") == ["x"]
    assert differences([1], [1], "x") == []
