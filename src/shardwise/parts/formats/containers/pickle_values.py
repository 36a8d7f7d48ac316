"""The values that pickles may contain: a closed list of types of Python and numpy; and errors.

Instances of other classes become a `PickledInstance`, or are refused.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.kernel.errors import FormatError
from shardwise.kernel.state.hostile_keys import KeyCounter, UnsafeValueError
from shardwise.parts.formats.foreign import StoredComposite

MALFORMED_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that malformed pickles cause. A FormatError is a ValueError, too."""


class TruncatedError(FormatError):
    """The pickle continues after the end of the data."""


class UnknownClassError(FormatError):
    """The pickle contains objects of classes or functions that are not allowed.

    Attributes:
        names: the names of these classes and functions, as text.
    """

    def __init__(self, message: str, names: str = "") -> None:
        super().__init__(message)
        self.names = names


class UnsupportedValueError(FormatError):
    """The pickle is intact, but contains a value that is not read.

    Attributes:
        remedy: an action that the user can take.
    """

    def __init__(
        self,
        reason: str,
        remedy: str = "save tensors and plain values only, for example from state_dict()",
    ) -> None:
        super().__init__(reason)
        self.remedy = remedy


def explain_error(error: Exception, position: str) -> FormatError:
    """Return the error with the kind of the problem, its position and a remedy in its message."""
    if isinstance(error, UnsupportedValueError):
        return type(error)(f"{error} ({position}): this is not supported; {error.remedy}")
    if isinstance(error, UnsafeValueError):
        return FormatError(
            f"{error} ({position}): this is refused. If you trust it, load it with torch, and "
            "save it again with tensors and plain values only"
        )
    if isinstance(error, TruncatedError):
        return TruncatedError(
            f"the pickle is truncated, or contains a wrong length: {error} ({position}); "
            "copy the file again"
        )
    reason = "a value is missing" if isinstance(error, LookupError) else str(error)
    return FormatError(
        f"the pickle or its file is damaged: {reason} ({position}); copy the file again, or "
        "save it again"
    )


Constructor: TypeAlias = Callable[..., object]
"""A function that builds a value from the arguments in a pickle, which are not trusted.

It raises TypeError, ValueError, LookupError, ArithmeticError or RuntimeError for bad arguments. A
pickle may add items to the value, so the value must not have methods that a pickle could abuse. A
hashable value must not contain other values.

It raises UnsupportedValueError for valid arguments that shardwise does not support.
`pickles.unpickle` adds the path of the file, the position, and what to do."""


AllowedNames: TypeAlias = Mapping[str, Constructor | torch.dtype]
"""A closed list of dotted names in pickles, with the constructor of each; or with a dtype."""


@dataclass(frozen=True, slots=True)
class AllowedCallable:
    """An allowed class or function, as a value in a pickle. The pickle cannot call it itself."""

    name: str
    construct: Constructor


@dataclass(frozen=True, slots=True)
class UnknownObject:
    """A placeholder for a class or function that is not allowed, and for its results."""

    name: str

    @property
    def reason(self) -> str:
        """Why a value with this object is left out, and what to do."""
        return (
            f"it contains an object of {self.name}, and shardwise runs no code from pickles: save "
            "it as tensors and plain values if you need it"
        )


@dataclass(slots=True, eq=False)
class PickledInstance:
    """An instance of a class: its arguments and attributes, without its methods.

    For a member of an enum, `args` contains only its stored value or name.
    """

    name: str
    args: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)

    def set_state(self, state: object) -> None:
        """Set attributes from a state: a dict, or a pair of a dict and the attributes in slots.

        Raises:
            TypeError: the state has another form.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if part is None:
                continue
            if not isinstance(part, dict) or not all(type(key) is str for key in part):
                raise TypeError(f"the attributes of a {self.name} are not a dict with text as keys")
            self.fields.update(part)


def allow_as_instances(*names: str) -> AllowedNames:
    """Return constructors for classes whose instances or members become `PickledInstance`s."""
    return {name: _instance_constructor(name) for name in names}


def _instance_constructor(name: str) -> Constructor:
    return lambda *args: PickledInstance(name, args)


def find_unknown(value: object) -> UnknownObject | None:
    """Return an `UnknownObject` among the first 1000 parts of a value; None if there is none."""
    values = [value]
    for found in values:
        if isinstance(found, UnknownObject):
            return found
        values += list_parts(found)[: max(0, 1000 - len(values))]
    return None


def list_parts(value: object) -> Sequence[object]:
    """Return the keys, values and items of a container, and the attributes of an instance."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, PickledInstance):
        return [*value.args, *value.fields.values()]
    if isinstance(value, StoredComposite):
        return [value.context, *(part for _, part in value.inner)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NUMBER_DTYPE = re.compile(r"[|<=]?[biufc]\d{1,2}")


def set_state(value: object, state: object) -> None:
    """Set the state of a value.

    Raises:
        TypeError: the state is malformed.
        UnsupportedValueError: the value has no state, or is not little-endian.
    """
    if isinstance(value, PickledInstance):
        value.set_state(state)
    elif isinstance(value, np.ndarray):
        _fill_array(value, state)
    elif isinstance(value, np.dtype):
        if not isinstance(state, tuple) or state[1] not in ("<", "|", "="):
            raise UnsupportedValueError(
                "a numpy array is not little-endian", "convert its dtype with newbyteorder('<')"
            )
    elif not isinstance(value, (UnknownObject, OrderedDict)):
        # The attributes of an OrderedDict are version numbers of modules, not part of a state.
        raise UnsupportedValueError(f"a {type(value).__name__} has attributes")


def _fill_array(array: Array, state: object) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("the state of a numpy array is not a tuple of five values")
    _, shape, dtype, is_fortran_order, data = state
    _check_array(dtype, shape, data)
    array.__setstate__((1, shape, dtype, bool(is_fortran_order), bytes(data)))  # type: ignore[arg-type]


def _check_array(dtype: object, shape: object, data: object) -> None:
    if not isinstance(dtype, np.dtype) or not _NUMBER_DTYPE.fullmatch(dtype.str):
        raise UnsupportedValueError("a numpy array contains values that are not numbers")
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise TypeError("a numpy array has an invalid shape")
    if len(shape) > 32 or not isinstance(data, (bytes, bytearray)):
        raise TypeError("a numpy array has more than 32 dimensions, or its content is not bytes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are not a numpy array of shape {list(shape)}")


def _make_dtype(code: object, *_: object) -> np.dtype[Any]:
    # np.dtype alone would also accept structured dtypes and objects.
    if not isinstance(code, str) or not _NUMBER_DTYPE.fullmatch(code):
        raise UnsupportedValueError(
            f"numpy dtype {str(code)[:40]!r} is not a little-endian dtype of numbers"
        )
    return np.dtype(code)


def _make_empty_array(*_: object) -> Array:
    return np.zeros(0, np.uint8)


def _array_from_buffer(data: object, dtype: object, shape: object, order: object) -> Array:
    array = _make_empty_array()
    _fill_array(array, (1, shape, dtype, order == "F", data))
    return array


def _make_scalar(dtype: object, data: object) -> object:
    return _array_from_buffer(data, dtype, (), "C")[()]


def _encode_text(text: object, codec: object = "utf-8") -> bytes:
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise UnsupportedValueError(f"bytes that are encoded with codec {str(codec)[:40]!r}")
    return text.encode(codec)


def _make_bytes(data: object = b"", codec: object = None) -> bytes:
    if isinstance(data, str):
        return _encode_text(data, codec)
    # bytes(n) would allocate n zeros.
    if not isinstance(data, (bytes, bytearray, list)):
        raise TypeError(f"bytes() is called with a {type(data).__name__}, not with bytes or a list")
    return bytes(data)


def _make_ordered_dict(pairs: object = ()) -> OrderedDict[Any, Any]:
    if pairs == ():
        return OrderedDict()  # each tensor has an empty OrderedDict, for its hooks
    pair_list = list(_list_pairs(pairs))
    KeyCounter().add(key for key, _ in pair_list)
    return OrderedDict(pair_list)


def _list_pairs(pairs: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(pairs, dict):
        return pairs.items()
    return [(key, value) for key, value in _list_items(pairs)]


def _list_items(items: object) -> list[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise TypeError(f"expected a list, tuple or set of items, found {type(items).__name__}")
    return list(items)


def _make_set(items: object = ()) -> set[Any]:
    item_list = _list_items(items)
    KeyCounter().add(item_list)
    return set(item_list)


def call_with(function: Callable[..., object], *kinds: type | tuple[type, ...]) -> Constructor:
    """Return a constructor that calls a function, if the arguments have these types."""

    def construct(*args: object) -> object:
        are_known = map(isinstance, args, kinds)
        if len(args) > len(kinds) or not all(are_known):
            found = ", ".join(type(arg).__name__ for arg in args)
            raise TypeError(f"a class or function is called with arguments of types: {found}")
        return function(*args)

    return construct


def _format_datetime(data: Any, *_: object) -> str:
    # Pickles call the class with bytes.
    return datetime.datetime(data).isoformat(timespec="microseconds")  # type: ignore[call-arg]


def _format_date(data: Any) -> str:
    return datetime.date(data).isoformat()  # type: ignore[call-arg]


def _seconds_of_timedelta(*durations: int) -> float:
    return datetime.timedelta(*durations).total_seconds()


def _make_enum_member(enum_class: object, member: object) -> object:
    # Pickles have a call `getattr(class, name)` for members of enums and, before protocol 4, for
    # nested classes. No attribute is looked up.
    if isinstance(enum_class, UnknownObject):
        return enum_class
    if not isinstance(enum_class, AllowedCallable) or not isinstance(member, str):
        raise TypeError("getattr() is called with a value that is not an enum")
    value = enum_class.construct(member)
    if not isinstance(value, (PickledInstance, AllowedCallable)):
        raise UnsupportedValueError(f"an attribute of {enum_class.name}, which is not an enum")
    return value


def _make_instance(instance_class: object, *args: object) -> object:
    if isinstance(instance_class, UnknownObject):
        return instance_class
    if not isinstance(instance_class, AllowedCallable):
        raise TypeError("an instance is created from a value that is not a class")
    return instance_class.construct(*args)


def _reconstruct_instance(instance_class: object, base: object, state: object) -> object:
    return _make_instance(instance_class, *(() if state is None else (state,)))


def _join_path(*parts: object) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path has a part that is not text")
    return "/".join(map(str, parts)).replace("//", "/")


_NUMPY: dict[str, Constructor] = {
    "multiarray._reconstruct": _make_empty_array,
    "multiarray.scalar": _make_scalar,
    "numeric._frombuffer": _array_from_buffer,
}
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")

ALLOWED_NAMES: AllowedNames = {
    **{f"numpy.core.{name}": construct for name, construct in _NUMPY.items()},
    **{f"numpy._core.{name}": construct for name, construct in _NUMPY.items()},
    "numpy.ndarray": _make_empty_array,
    "numpy.dtype": _make_dtype,
    "_codecs.encode": _encode_text,
    "builtins.bytearray": lambda *args: bytearray(_make_bytes(*args)),
    "builtins.bytes": _make_bytes,
    "builtins.complex": call_with(complex, (int, float), (int, float)),
    "builtins.dict": lambda pairs=(): dict(_make_ordered_dict(pairs)),
    "builtins.frozenset": lambda items=(): frozenset(_make_set(items)),
    "builtins.getattr": _make_enum_member,
    "builtins.list": lambda items=(): _list_items(items),
    "builtins.object": lambda: PickledInstance("object"),
    "builtins.range": call_with(range, int, int, int),
    "builtins.set": _make_set,
    "builtins.slice": call_with(slice, *[(int, type(None))] * 3),
    "builtins.str": call_with(str, str),
    "builtins.tuple": lambda items=(): tuple(_list_items(items)),
    "builtins.xrange": call_with(range, int, int, int),
    "collections.Counter": lambda pairs=(): Counter(dict(_make_ordered_dict(pairs))),
    "collections.OrderedDict": _make_ordered_dict,
    "collections.defaultdict": lambda *_: {},
    "collections.deque": lambda items=(), *_: _list_items(items),
    "copyreg.__newobj__": _make_instance,
    "copyreg._reconstructor": _reconstruct_instance,
    "datetime.date": call_with(_format_date, bytes),
    "datetime.datetime": call_with(_format_datetime, bytes, object),
    "datetime.timedelta": call_with(_seconds_of_timedelta, int, int, int),
    **{
        f"{module}.{name}": _join_path
        for module in ("pathlib", "pathlib._local")
        for name in _PATHS
    },
    **allow_as_instances("argparse.Namespace", "types.SimpleNamespace"),
}
"""Dates and paths become text. Deques become lists, defaultdicts dicts, and timedeltas seconds."""
