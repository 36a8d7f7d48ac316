"""What a pickle's classes and functions become when it is read: names and inert values."""

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
"""Makes a value of the arguments in a pickle. They are not trusted: TypeError, ValueError,
LookupError, ArithmeticError or RuntimeError say that they make no sense. What is made must have no
method that a pickle could turn to harm, for it may be given items; and be flat, if it is hashed."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A name that stands for this value itself, as `torch.float32` does."""

    value: object


Stubs: TypeAlias = Mapping[str, Builder | Constant]
"""A closed list: dotted names, as pickles have them, and what becomes of each."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that is on the list, where a pickle has it as a value."""

    name: str
    build: Builder


@dataclass(frozen=True, slots=True)
class Opaque:
    """In place of a class or function that is not on the list, and of all that it would make."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """In place of an instance of a class: its arguments and attributes, and none of its methods.

    A member of an enum has its value as the only argument, or its name if that is what was stored.
    """

    name: str
    args: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)

    def set_state(self, state: object) -> None:
        """Take attributes as pickles have them: a dict, or a pair of that and those of slots.

        Raises:
            TypeError: they are no such thing.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if part is None:
                continue
            if not isinstance(part, dict) or not all(type(key) is str for key in part):
                raise TypeError(f"the attributes of a {self.name} are no names and values")
            self.fields.update(part)


def records(*names: str) -> Stubs:
    """Classes whose instances, or members, become records."""
    return {name: _record_of(name) for name in names}


def _record_of(name: str) -> Builder:
    return lambda *args: Record(name, args)


Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_NUMBERS = re.compile(r"[|<=]?[biufc]\d{1,2}")


def set_state(made: object, state: object) -> None:
    """Give a value that was made the rest of it.

    Raises:
        TypeError, ValueError: it takes none, or not this.
    """
    if isinstance(made, Record):
        made.set_state(state)
    elif isinstance(made, np.ndarray):
        _fill(made, state)
    elif isinstance(made, np.dtype):
        if not isinstance(state, tuple) or state[1] not in ("<", "|", "="):
            raise ValueError("a numpy dtype is not little-endian")
    elif not isinstance(made, (Opaque, OrderedDict)):
        # An OrderedDict's attributes are the version numbers of modules, and no part of a state.
        raise TypeError(f"a {type(made).__name__} has no attributes to be set")


def _fill(array: Array, state: object) -> None:
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("the content of a numpy array is not five things")
    _, shape, dtype, fortran, data = state
    _check_numbers(dtype, shape, data)
    array.__setstate__((1, shape, dtype, bool(fortran), bytes(data)))  # type: ignore[arg-type]


def _check_numbers(dtype: object, shape: object, data: object) -> None:
    if not isinstance(dtype, np.dtype) or not _NUMBERS.fullmatch(dtype.str):
        raise TypeError("a numpy array of anything but numbers")
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in shape):
        raise TypeError("the shape of a numpy array is none")
    if len(shape) > 32 or not isinstance(data, (bytes, bytearray)):
        raise TypeError("the content of a numpy array is no bytes")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are not a numpy array of shape {list(shape)}")


def _dtype(code: object, *_: object) -> np.dtype[Any]:
    # Not all that numpy parses, which is far more.
    if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
        raise ValueError(f"numpy dtype {str(code)[:40]!r} is none of numbers")
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
        raise ValueError("bytes are spelled in no codec that pickles use")
    return text.encode(codec)


def _bytes(data: object = b"", codec: object = None) -> bytes:
    if isinstance(data, str):
        return _text_to_bytes(data, codec)
    # A number would allocate as many zeros.
    if not isinstance(data, (bytes, bytearray, list)):
        raise TypeError("bytes of something else")
    return bytes(data)


def _ordered(pairs: object = ()) -> OrderedDict[Any, Any]:
    if pairs == ():
        return OrderedDict()  # as every tensor has one
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
        raise TypeError("items of something that is no list")
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
        raise TypeError("a complex number of something else")
    return complex(real, imaginary)


def _slice(*bounds: object) -> slice:
    _check_bounds(bounds)
    return slice(*bounds)


def _range(*bounds: Any) -> range:
    _check_bounds(bounds)
    return range(*bounds)


def _check_bounds(bounds: tuple[object, ...]) -> None:
    if not 1 <= len(bounds) <= 3 or not all(n is None or type(n) is int for n in bounds):
        raise TypeError("bounds are no numbers")


def _member(kind: object, member: object) -> object:
    # How some versions of Python store members of enums; of nothing else is an attribute looked up.
    if isinstance(kind, Opaque):
        return kind
    if not isinstance(kind, Name) or not isinstance(member, str):
        raise TypeError("an attribute of something that is no enum")
    made = kind.build(member)
    if not isinstance(made, Record):
        raise TypeError(f"{kind.name} is no enum")
    return made


def _instance(kind: object, *args: object) -> object:
    if isinstance(kind, Opaque):
        return kind
    if not isinstance(kind, Name):
        raise TypeError("an instance of something that is no class")
    return kind.build(*args)


def _old_instance(kind: object, base: object, state: object) -> object:
    return _instance(kind) if state is None else _instance(kind, state)


def _path(*parts: object) -> str:
    if not all(isinstance(part, str) for part in parts):
        raise TypeError("a path of something that is no text")
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
        raise TypeError("a timedelta of something that is no number")
    return sum(n * unit for n, unit in zip(counts, (86400, 1, 1e-6), strict=True))  # type: ignore[operator, misc]


def _text(text: object = "") -> str:
    if not isinstance(text, str):
        raise TypeError("a text of something else")
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
"""Times and paths become text, deques lists, defaultdicts dicts, and a timedelta its seconds."""


DEEPEST = 100
_CONTAINERS = (dict, list, tuple, set, frozenset, Record, slice)


def check_unfolded(value: object, most: int) -> None:
    """Refuse what would have more than `most` values if all references were copies.

    Raises:
        FormatError: it would; or it is nested more than `DEEPEST` deep, or within itself.
    """
    done: dict[int, tuple[int, int]] = {}  # how many values are in a container, and how deep
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
                raise FormatError("values are nested too deep, or repeated too often, to be meant")
            done[id(here)] = size, depth
        elif id(here) in entered:
            raise FormatError("a value holds itself")
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
