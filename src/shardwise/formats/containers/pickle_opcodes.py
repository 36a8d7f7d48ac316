"""The opcodes of pickles, as operations on the stack of a restricted machine."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Constant, Name, Opaque, Stubs, set_state
from shardwise.state.keys import SAFE_KEYS, Keys

NEWEST = 5
SENSELESS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that malformed values raise."""
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

Persistent: TypeAlias = Callable[[Any], object]
"""Returns the value of a persistent id, or raises one of `SENSELESS`."""
Operation: TypeAlias = Callable[["Machine", int], int]
"""Takes the position of the opcode's argument; returns the position of the next opcode."""


class CutOffError(FormatError):
    """The pickle is longer than the data."""


class Machine:
    """The stack, marks and memo of a pickle."""

    def __init__(self, data: bytes, stubs: Stubs, persistent: Persistent | None) -> None:
        self.data = data
        self.stubs = stubs
        self.persistent = persistent
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.names: dict[tuple[str, str], object] = {}
        self.unknown: set[str] = set()
        self._keys: dict[int, tuple[object, Keys]] = {}

    def take(self, at: int, count: int) -> bytes:
        """Return `count` bytes."""
        if count > len(self.data) - at:
            raise CutOffError(
                "the pickle is cut off or contains a wrong length: copy the file again"
            )
        return self.data[at : at + count]

    def line(self, at: int) -> tuple[str, int]:
        """Return the text up to the end of the line, and the start of the next line."""
        end = self.data.find(b"\n", at)
        if end < 0:
            raise CutOffError("it is cut off")
        return self.data[at:end].decode(), end + 1

    def count_keys(self, target: object, keys: Sequence[object]) -> None:
        """Count keys before they are added to a dict or set; see `Keys.add`.

        Raises:
            FormatError: too many keys have the same hash.
        """
        if SAFE_KEYS.issuperset(map(type, keys)):
            return
        # The target is kept alive, so that its id stays unique.
        _, counted = self._keys.setdefault(id(target), (target, Keys()))
        try:
            counted.add(keys)
        except ValueError as error:
            raise FormatError(str(error)) from error

    def since_mark(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def find(self, module: str, name: str) -> object:
        """Return the value of a global name."""
        found = self.names.get((module, name))
        if found is None:
            full = f"{_RENAMED.get(module, module)}.{name}"
            stub = self.stubs.get(full)
            if stub is None:
                self.unknown.add(full[:200])
                found = Opaque(full[:200])
            else:
                found = stub.value if isinstance(stub, Constant) else Name(full, stub)
            self.names[module, name] = found
        return found

    def make(self, kind: object, args: object) -> object:
        """Call the builder of a class or function on the list."""
        if isinstance(kind, Opaque):
            return kind
        if not isinstance(kind, Name) or not isinstance(args, tuple):
            raise FormatError("it calls something that is not a class or function")
        try:
            return kind.build(*args)
        except SENSELESS as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"invalid arguments of {kind.name}: {error}") from error


def _refused(machine: Machine, at: int) -> int:
    op = machine.data[at - 1 : at]
    raise FormatError(f"not a pickle, or one with an unsupported opcode: {op!r}")


def _proto(machine: Machine, at: int) -> int:
    version = machine.data[at]
    if version > NEWEST:
        raise FormatError(
            f"pickle protocol {version} is newer than {NEWEST}, the newest that is supported"
        )
    return at + 1


def _frame(machine: Machine, at: int) -> int:
    machine.take(at + 8, int.from_bytes(machine.take(at, 8), "little"))
    return at + 8


def _pop(machine: Machine, at: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return at


def _pop_mark(machine: Machine, at: int) -> int:
    machine.since_mark()
    return at


def _dup(machine: Machine, at: int) -> int:
    machine.stack.append(machine.stack[-1])
    return at


def _long_get(machine: Machine, at: int) -> int:
    machine.stack.append(machine.memo[int.from_bytes(machine.take(at, 4), "little")])
    return at + 4


def _memoize(machine: Machine, at: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    return at


def _constant(value: object) -> Operation:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(value)
        return at

    return push


def _empty(kind: type) -> Operation:
    def push(machine: Machine, at: int) -> int:
        machine.stack.append(kind())
        return at

    return push


def _number(code: str) -> Operation:
    form = struct.Struct(code)

    def push(machine: Machine, at: int) -> int:
        machine.stack += form.unpack_from(machine.data, at)
        return at + form.size

    return push


def _sized(width: int, of: Callable[[bytes], object]) -> Operation:
    def push(machine: Machine, at: int) -> int:
        count = int.from_bytes(machine.take(at, width), "little")
        at += width
        machine.stack.append(of(machine.take(at, count)))
        return at + count

    return push


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _old_text(data: bytes) -> str | bytes:
    # Python 2 stored text and bytes alike.
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple_of(count: int) -> Operation:
    def push(machine: Machine, at: int) -> int:
        items = tuple(machine.stack[-count:])
        if len(items) < count:
            raise IndexError("the stack is empty")
        machine.stack[-count:] = [items]
        return at

    return push


def _append(machine: Machine, at: int) -> int:
    item = machine.stack.pop()
    _extend(machine, [item])
    return at


def _appends(machine: Machine, at: int) -> int:
    _extend(machine, machine.since_mark())
    return at


def _extend(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target += items
    elif not isinstance(target, Opaque):
        raise FormatError(f"it appends to a {type(target).__name__}")


def _set_item(machine: Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine, [key, value])
    return at


def _set_items(machine: Machine, at: int) -> int:
    _update(machine, machine.since_mark())
    return at


def _update(machine: Machine, items: list[Any]) -> None:
    target = machine.stack[-1]
    keys = items[::2]
    if not isinstance(target, dict):
        if isinstance(target, Opaque):
            return
        raise FormatError(f"it sets items of a {type(target).__name__}")
    machine.count_keys(target, keys)
    target.update(zip(keys, items[1::2], strict=True))


def _add_items(machine: Machine, at: int) -> int:
    items, target = machine.since_mark(), machine.stack[-1]
    if type(target) is set:
        machine.count_keys(target, items)
        target.update(items)
    elif not isinstance(target, Opaque):
        raise FormatError(f"it adds to a {type(target).__name__}")
    return at


def _frozen_set(machine: Machine, at: int) -> int:
    items = machine.since_mark()
    machine.count_keys(items, items)
    machine.stack.append(frozenset(items))
    return at


def _global(machine: Machine, at: int) -> int:
    module, at = machine.line(at)
    name, at = machine.line(at)
    machine.stack.append(machine.find(module, name))
    return at


def _stack_global(machine: Machine, at: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError("it names a class by something that is not text")
    machine.stack.append(machine.find(module, name))
    return at


def _reduce(machine: Machine, at: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.make(machine.stack[-1], args)
    return at


def _new_with_keywords(machine: Machine, at: int) -> int:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    kind = machine.stack[-1]
    if keywords and not isinstance(kind, Opaque):
        raise FormatError(
            "the pickle creates a value with keyword arguments, which is not supported"
        )
    machine.stack[-1] = machine.make(kind, args)
    return at


def _build(machine: Machine, at: int) -> int:
    state = machine.stack.pop()
    set_state(machine.stack[-1], state)
    return at


def _persistent(machine: Machine, at: int) -> int:
    if machine.persistent is None:
        raise FormatError("it refers to external storage, which does not exist here")
    machine.stack[-1] = machine.persistent(machine.stack[-1])
    return at


def _operations() -> list[Operation]:
    table: list[Operation] = [_refused] * 256
    for code, operation in {
        pickle.PROTO: _proto,
        pickle.FRAME: _frame,
        pickle.POP: _pop,
        pickle.POP_MARK: _pop_mark,
        pickle.DUP: _dup,
        pickle.LONG_BINGET: _long_get,
        pickle.MEMOIZE: _memoize,
        pickle.NONE: _constant(None),
        pickle.NEWTRUE: _constant(True),
        pickle.NEWFALSE: _constant(False),
        pickle.EMPTY_TUPLE: _constant(()),
        pickle.EMPTY_LIST: _empty(list),
        pickle.EMPTY_DICT: _empty(dict),
        pickle.EMPTY_SET: _empty(set),
        pickle.BININT: _number("<i"),
        pickle.BININT2: _number("<H"),
        pickle.BINFLOAT: _number(">d"),
        pickle.LONG1: _sized(1, _integer),
        pickle.LONG4: _sized(4, _integer),
        pickle.SHORT_BINUNICODE: _sized(1, _text),
        pickle.BINUNICODE8: _sized(8, _text),
        pickle.SHORT_BINBYTES: _sized(1, bytes),
        pickle.BINBYTES: _sized(4, bytes),
        pickle.BINBYTES8: _sized(8, bytes),
        pickle.BYTEARRAY8: _sized(8, bytearray),
        pickle.SHORT_BINSTRING: _sized(1, _old_text),
        pickle.BINSTRING: _sized(4, _old_text),
        pickle.TUPLE1: _tuple_of(1),
        pickle.TUPLE2: _tuple_of(2),
        pickle.TUPLE3: _tuple_of(3),
        pickle.APPEND: _append,
        pickle.APPENDS: _appends,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: _set_items,
        pickle.ADDITEMS: _add_items,
        pickle.FROZENSET: _frozen_set,
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.REDUCE: _reduce,
        pickle.NEWOBJ: _reduce,  # the same here, because neither calls a class
        pickle.NEWOBJ_EX: _new_with_keywords,
        pickle.BUILD: _build,
        pickle.BINPERSID: _persistent,
    }.items():
        table[code[0]] = operation
    return table


OPERATIONS = _operations()
"""Operations by opcode, except those that `pickles` inlines. Opcodes of protocol 0, registered
extensions and out-of-band buffers are refused."""
