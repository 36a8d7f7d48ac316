"""The values that pickles may contain: a closed list of Python's and numpy's, and inert records."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from shardwise.errors import FormatError
from shardwise.state.keys import check_keys

Builder: TypeAlias = Callable[..., object]
"""Builds a value from the arguments in a pickle, which are not trusted. It raises TypeError,
ValueError, LookupError, ArithmeticError or RuntimeError for bad arguments. The value must not have
methods that a pickle could abuse, since items may be added to it. If hashable, it must be flat."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A name that stands for a value, such as `torch.float32`."""

    value: object


Stubs: TypeAlias = Mapping[str, Builder | Constant]
"""A closed list of dotted names in pickles, and the builder or constant for each."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function on the list, as a value in a pickle."""

    name: str
    build: Builder


@dataclass(frozen=True, slots=True)
class Opaque:
    """A placeholder for a class or function that is not on the list, and for its results."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """An instance of a class: its arguments and attributes, without its methods.

    A member of an enum has its stored value or name as the only argument.
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
                raise TypeError(f"the attributes of a {self.name} are not a dict of names")
            self.fields.update(part)


def records(*names: str) -> Stubs:
    """Return stubs for classes whose instances or members become records."""
    return {name: _record_of(name) for name in names}


def _record_of(name: str) -> Builder:
    return lambda *args: Record(name, args)


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = re.compile(r"[|<=]?[biufc]\d{1,2}")


def set_state(made: object, state: object) -> None:
    """Set the state of a value.

    Raises:
        TypeError, ValueError: the value has no state, or the state is malformed.
    """
    if isinstance(made, Record):
        made.set_state(state)
    elif isinstance(made, np.ndarray):
        _fill(made, state)
    elif isinstance(made, np.dtype):
        if not isinstance(state, tuple) or state[1] not in ("<", "|", "="):
            raise ValueError("a numpy dtype is not little-endian")
    elif not isinstance(made, (Opaque, OrderedDict)):
        # The attributes of an OrderedDict are version numbers of modules, not part of a state.
        raise TypeError(f"a {type(made).__name__} has no attributes to set")


def _fill(array: Array, state: object) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("the state of a numpy array is not a tuple of five")
    _, shape, dtype, fortran, data = state
    _check_numbers(dtype, shape, data)
    array.__setstate__((1, shape, dtype, bool(fortran), bytes(data)))  # type: ignore[arg-type]


def _check_numbers(dtype: object, shape: object, data: object) -> None:
    if not isinstance(dtype, np.dtype) or not _NUMBERS.fullmatch(dtype.str):
        raise TypeError("a numpy array of objects, where only numbers are read")
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise TypeError("a numpy array has an invalid shape")
    if len(shape) > 32 or not isinstance(data, (bytes, bytearray)):
        raise TypeError("the content of a numpy array is not bytes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are not a numpy array of shape {list(shape)}")


def _dtype(code: object, *_: object) -> np.dtype[Any]:
    # Numpy itself would parse much more.
    if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
        raise ValueError(f"numpy dtype {str(code)[:40]!r} is not a dtype of numbers")
    return np.dtype(code)


def _empty_array(*_: object) -> Array:
    return np.zeros(0, np.uint8)


def _array_from(data: object, dtype: object, shape: object, order: object) -> Array:
    array = _empty_array()
    _fill(array, (1, shape, dtype, order == "F", data))
    return array


def _scalar(dtype: object, data: object) -> object:
    _check_numbers(dtype, (), data)
    return _array_from(data, dtype, (), "C")[()]


def _text_to_bytes(text: object, codec: object = "utf-8") -> bytes:
    if not isinstance(text, str) or codec not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError("bytes are encoded with a codec that pickles do not use")
    return text.encode(codec)


def _bytes(data: object = b"", codec: object = None) -> bytes:
    if isinstance(data, str):
        return _text_to_bytes(data, codec)
    # bytes(n) would allocate n zeros.
    if not isinstance(data, (bytes, bytearray, list)):
        raise TypeError("bytes() of something that is not bytes or a list")
    return bytes(data)


def _ordered(pairs: object = ()) -> OrderedDict[Any, Any]:
    if pairs == ():
        return OrderedDict()  # every tensor has an empty one: its hooks
    listed = list(_items(pairs))
    check_keys(key for key, _ in listed)
    return OrderedDict(listed)


def _counter(pairs: object = ()) -> Counter[Any]:
    return Counter(dict(_ordered(pairs)))


def _defaultdict(*_: object) -> dict[Any, Any]:
    return {}


def _items(pairs: object) -> Iterable[tuple[Any, Any]]:
    if isinstance(pairs, dict):
        return pairs.items()
    return [(key, value) for key, value in _listed(pairs)]


def _listed(items: object) -> list[Any]:
    if not isinstance(items, (list, tuple, set, frozenset)):
        raise TypeError("items of something that is not a list, tuple or set")
    return list(items)


def _list(items: object = (), *_: object) -> list[Any]:
    return _listed(items)


def _set(items: object = ()) -> set[Any]:
    listed = _listed(items)
    check_keys(listed)
    return set(listed)


def _frozenset(items: object = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _complex(real: object = 0.0, imaginary: object = 0.0) -> complex:
    if not isinstance(real, (int, float)) or not isinstance(imaginary, (int, float)):
        raise TypeError("complex() of something that is not a number")
    return complex(real, imaginary)


def _slice(*bounds: object) -> slice:
    _check_bounds(bounds)
    return slice(*bounds)


def _range(*bounds: Any) -> range:
    _check_bounds(bounds)
    return range(*bounds)


def _check_bounds(bounds: tuple[object, ...]) -> None:
    if not 1 <= len(bounds) <= 3 or not all(n is None or type(n) is int for n in bounds):
        raise TypeError("slice or range with bounds that are not integers")


def _member(kind: object, member: object) -> object:
    # Some versions of Python store members of enums this way. No attribute is looked up.
    if isinstance(kind, Opaque):
        return kind
    if not isinstance(kind, Name) or not isinstance(member, str):
        raise TypeError("getattr() of something that is not an enum")
    made = kind.build(member)
    if not isinstance(made, Record):
        raise TypeError(f"{kind.name} is not an enum")
    return made


def _instance(kind: object, *args: object) -> object:
    if isinstance(kind, Opaque):
        return kind
    if not isinstance(kind, Name):
        raise TypeError("an instance of something that is not a class")
    return kind.build(*args)


def _old_instance(kind: object, base: object, state: object) -> object:
    return _instance(kind) if state is None else _instance(kind, state)


def _path(*parts: object) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path with a part that is not text")
    return "/".join(map(str, parts)).replace("//", "/")


def _datetime(*args: object) -> str:
    data = args[0] if args else None
    if not isinstance(data, bytes) or len(data) != 10:
        raise TypeError("a datetime is not ten bytes")
    year, (month, day, hour, minute, second) = int.from_bytes(data[:2], "big"), data[2:7]
    micro = int.from_bytes(data[7:], "big")
    return f"{year:04}-{month & 127:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micro:06}"


def _date(data: object) -> str:
    if not isinstance(data, bytes) or len(data) != 4:
        raise TypeError("a date is not four bytes")
    return f"{int.from_bytes(data[:2], 'big'):04}-{data[2]:02}-{data[3]:02}"


def _seconds(days: object = 0, seconds: object = 0, microseconds: object = 0) -> float:
    counts = [days, seconds, microseconds]
    if not all(type(n) is int and abs(n) < 2**40 for n in counts):
        raise TypeError("timedelta() of something that is not an integer")
    return sum(n * unit for n, unit in zip(counts, (86400, 1, 1e-6), strict=True))  # type: ignore[operator, misc]


def _text(text: object = "") -> str:
    if not isinstance(text, str):
        raise TypeError("str() of something that is not text")
    return text


def _namespace(*args: object) -> Record:
    return Record("argparse.Namespace", args)


_NUMPY: dict[str, Builder] = {
    "multiarray._reconstruct": _empty_array,
    "multiarray.scalar": _scalar,
    "numeric._frombuffer": _array_from,
}
_PATHS = ("Path", "PosixPath", "PurePath", "PurePosixPath", "WindowsPath", "PureWindowsPath")

ALLOWED: Stubs = {
    **{f"numpy.core.{name}": build for name, build in _NUMPY.items()},
    **{f"numpy._core.{name}": build for name, build in _NUMPY.items()},
    "numpy.ndarray": _empty_array,
    "numpy.dtype": _dtype,
    "_codecs.encode": _text_to_bytes,
    "argparse.Namespace": _namespace,
    "builtins.bytearray": lambda *args: bytearray(_bytes(*args)),
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.dict": lambda pairs=(): dict(_ordered(pairs)),
    "builtins.frozenset": _frozenset,
    "builtins.getattr": _member,
    "builtins.list": _list,
    "builtins.object": lambda: Record("object"),
    "builtins.range": _range,
    "builtins.set": _set,
    "builtins.slice": _slice,
    "builtins.str": _text,
    "builtins.tuple": lambda items=(): tuple(_listed(items)),
    "builtins.xrange": _range,
    "collections.Counter": _counter,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _defaultdict,
    "collections.deque": _list,
    "copyreg.__newobj__": _instance,
    "copyreg._reconstructor": _old_instance,
    "datetime.date": _date,
    "datetime.datetime": _datetime,
    "datetime.timedelta": _seconds,
    **{f"{module}.{name}": _path for module in ("pathlib", "pathlib._local") for name in _PATHS},
    **records("types.SimpleNamespace"),
}
"""Dates and paths become text, deques lists, defaultdicts dicts, and timedeltas seconds."""


DEEPEST = 100
_CONTAINERS = (dict, list, tuple, set, frozenset, Record, slice)


def check_unfolded(value: object, most: int) -> None:
    """Refuse values that are small in the file but huge or endless to walk through.

    Args:
        most: the largest number of values, where each reference counts as a copy.

    Raises:
        FormatError: there are more values, nesting is deeper than `DEEPEST`, or a value contains
            itself.
    """
    done: dict[int, tuple[int, int]] = {}  # by id: the number of values and the depth
    entered: set[int] = set()
    stack = [(value, False)]
    while stack:
        here, after = stack.pop()
        if id(here) in done:
            continue
        parts = _parts(here)
        inner = [part for part in parts if isinstance(part, _CONTAINERS)]
        if after or not inner:
            entered.discard(id(here))
            below = [done[id(part)] for part in inner]
            size = 1 + len(parts) + sum(n for n, _ in below)
            depth = 1 + max((n for _, n in below), default=0)
            if size > most or depth > DEEPEST:
                raise FormatError("values are nested too deeply or repeated too often")
            done[id(here)] = size, depth
        elif id(here) in entered:
            raise FormatError("a value contains itself")
        elif len(entered) > DEEPEST:
            raise FormatError(f"values are nested more than {DEEPEST} deep")
        else:
            entered.add(id(here))
            stack.append((here, True))
            stack += [(part, False) for part in inner]


def _parts(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Record):
        return [*value.args, *value.fields.values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []
