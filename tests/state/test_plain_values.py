"""Plain values to JSON and back: exactly, or refused by name."""

from __future__ import annotations

import contextlib
import enum
import math
import pickle
from base64 import b64encode
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import shardwise as sw
from shardwise.kernel.errors import StateError
from shardwise.ports.binding import decode, encode
from shardwise.testing.thread_group import ThreadGroup, run_ranks_and_catch


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 0


class Flags(enum.Flag):
    A = 1
    B = 2


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
    """Equal in type and value, the sign of zero included; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and isinstance(b, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
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


@given(values, st.data())
def test_what_was_saved_and_then_damaged_is_a_value_or_a_clear_error(
    value: object, data: st.DataObject
) -> None:
    encoded = msgspec.json.encode(encode([value, torch.ones(2), np.ones(2)], "value"))
    at = data.draw(st.integers(0, len(encoded) - 1))
    damaged = encoded[:at] + data.draw(st.binary(max_size=3)) + encoded[at + 1 :]
    with contextlib.suppress(StateError, msgspec.DecodeError, UnicodeDecodeError):
        decode(msgspec.json.decode(damaged), "value")


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
        (PurePosixPath("a"), "str(value)"),
        (defaultdict(list), "dict(value)"),
        (type("Text", (str,), {})("a"), "str(value)"),
        (Flags.A | Flags.B, "save its value"),
        (enum.Enum("Elsewhere", "A", module="nowhere").A, "save its value"),  # type: ignore[attr-defined]
        ("\ud800", "Unicode"),
        ({"\ud800": 1}, "Unicode"),
        ([10**5000], "digits"),
        (np.array([object()]), "only numbers"),
        (np.zeros(2, "i4,f4"), "only numbers"),
        (np.datetime64("2020-01-01"), "only numbers"),
        (torch.ones(2, 2).to_mkldnn(), "dense"),
        (torch.empty(2, device="meta"), "meta device"),
        ({torch.ones(1): 0}, "key"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_name_with_a_hint(value: object, hint: str) -> None:
    with pytest.raises(StateError, match=r"^state\.deep\.1") as refused:
        encode({"deep": [0, value]}, "state")
    assert hint in str(refused.value)


def test_two_tensors_never_take_one_name() -> None:
    for value in (
        {1: torch.ones(1), "1": torch.zeros(1)},
        {"a": {"b": np.ones(1)}, "a.b": torch.ones(1)},
    ):
        with pytest.raises(StateError, match=r"^x\.(1|a\.b): two tensors"):
            encode(value, "x", lambda name, tensor: None)


WRAPS: list[Callable[[object], object]] = [
    lambda value: [value],
    lambda value: (value,),
    lambda value: {"a": value},
    lambda value: {1: value},
    lambda value: OrderedDict(a=value),
]


def nested(depth: int, wrap: Callable[[object], object]) -> object:
    value: object = 1.5
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_can_be_saved_so_deep_can_be_loaded(wrap: Callable[[object], object]) -> None:
    value = nested(150, wrap)
    assert same(round_trip(value), value)
    with pytest.raises(StateError, match="more than 200 levels deep"):
        encode(nested(201, wrap), "value")


def test_a_stack_that_is_full_is_an_error_of_ours() -> None:
    def deep_in_a_program(frames: int, what: Callable[[], object]) -> object:
        return deep_in_a_program(frames - 1, what) if frames else what()

    value = nested(190, WRAPS[1])
    encoded = encode(value, "value")
    for what in (lambda: encode(value, "value"), lambda: decode(encoded, "value")):
        with pytest.raises(StateError, match="nested too deeply"):
            deep_in_a_program(700, what)


def test_what_contains_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    for cycle in (value, (value,), {1: value}):
        for allow_pickle in (False, True):
            with pytest.raises(StateError, match="contains itself"):
                encode(cycle, "value", allow_pickle=allow_pickle)


def test_pickle_needs_consent_both_ways() -> None:
    with pytest.raises(StateError, match="asdict"):
        encode(Settings(0.5), "value")
    assert round_trip(Settings(0.5), allow_pickle=True) == Settings(0.5)
    encoded = encode(Settings(0.5), "value", allow_pickle=True)
    with pytest.raises(StateError, match=r"^value: .*runs code.*allow_pickle=True"):
        decode(encoded, "value")


def test_only_what_has_no_plain_form_is_pickled() -> None:
    value = {"plain": (1, 2), "set": {1, 2}, "flags": Flags.A | Flags.B}
    encoded = encode(value, "value", allow_pickle=True)
    assert encoded["plain"] == {"$": "tuple", "v": [1, 2]}
    assert encoded["set"]["$"] == encoded["flags"]["$"] == "pickle"
    assert round_trip(value, allow_pickle=True) == value


def test_what_pickle_refuses_too_is_an_error_of_ours() -> None:
    with pytest.raises(
        StateError, match=r"^value\.f: a function is not a plain value, and pickle cannot save it"
    ):
        encode({"f": lambda: 0}, "value", allow_pickle=True)
    for text in (
        "AAAA",
        b64encode(pickle.dumps([1])[:-2]).decode(),
        b64encode(b"cno\nno\n.").decode(),
    ):
        with pytest.raises(StateError, match=r"^value: the pickled value cannot be unpickled"):
            decode({"$": "pickle", "v": text}, "value", allow_pickle=True)


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


@pytest.mark.parametrize(
    ("values", "differences"),
    [
        (
            ({"a": [1, 2], "b": 1}, {"a": [1, 3], "c": 1}),
            {"x.a.1": ("2", "3"), "x.b": ("1", "absent"), "x.c": ("absent", "1")},
        ),
        (({"k": (1, 2)}, {"k": (1, 3)}), {"x.k.1": ("2", "3")}),
        (([(1,)], [[1]]), {"x.0": ('{"$":"tuple","v":[1]}', "[1]")}),
        ((b"a", b"b"), {"x": ('{"$":"bytes","v":"YQ=="}', '{"$":"bytes","v":"Yg=="}')}),
        (({"a": None}, {"b": 0}), {"x.a": ("null", "absent"), "x.b": ("absent", "0")}),
        ((1, 2.0), {"x": ("1", "2.0")}),
        (("z" * 99, ""), {"x": ('"' + "z" * 39 + "…", '""')}),
    ],
)
def test_differences_between_ranks_are_shown(
    tmp_path: Path,
    values: tuple[object, object],
    differences: dict[str, tuple[str, str]],
) -> None:
    def save(group: ThreadGroup) -> sw.SaveReport:
        return sw.save(tmp_path, {"x": Kept(values[group.rank])}, group=group)

    for outcome in run_ranks_and_catch(2, save):
        assert isinstance(outcome, sw.MismatchError)
        assert outcome.problems == [
            f"{name}: {a} on rank 0, {b} on rank 1" for name, (a, b) in differences.items()
        ]


class Kept:
    """Something with a state."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, value: object) -> None:
        self.value = value
