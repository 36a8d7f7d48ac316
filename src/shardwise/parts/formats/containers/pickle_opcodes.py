"""The opcodes of pickles, as functions that change a `PickleMachine`. They run no code."""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch

from shardwise.kernel.errors import FormatError
from shardwise.kernel.state.hostile_keys import KeyCounter, UnsafeValueError
from shardwise.parts.formats.containers.pickle_values import (
    MALFORMED_ERRORS,
    AllowedCallable,
    AllowedNames,
    TruncatedError,
    UnknownObject,
    UnsupportedValueError,
    find_unknown,
    set_state,
)
from shardwise.parts.formats.containers.wrapper_classes import find_class

NEWEST_PROTOCOL = 5
_TEXT = frozenset({str})
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

PersistentLoad: TypeAlias = Callable[[Any], object]
"""A function that returns the value of a persistent id, or raises one of `MALFORMED_ERRORS`."""
Operation: TypeAlias = Callable[["PickleMachine"], None]
"""A function that runs an opcode. The position is that of the opcode's argument."""


class PickleMachine:
    """The stack, marks and memo of a pickle that is being read.

    Attributes:
        position: the offset of the next byte to read.
        allowed: the global names that the pickle may use.
        globals: the values of the global names that the pickle used so far.
        unknown_names: global names that are not in `allowed`.
    """

    def __init__(
        self, data: bytes, allowed: AllowedNames, persistent_load: PersistentLoad | None
    ) -> None:
        self.data = data
        self.position = 0
        self.allowed = allowed
        self.persistent_load = persistent_load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], object] = {}
        self.unknown_names: set[str] = set()
        self._key_counters: dict[int, tuple[object, KeyCounter]] = {}

    def take(self, count: int) -> bytes:
        """Read the next bytes; raise TruncatedError if there are fewer than `count`."""
        if count > len(self.data) - self.position:
            raise TruncatedError("a value continues after the end of the data")
        self.position += count
        return self.data[self.position - count : self.position]

    def take_count(self, width: int) -> int:
        """Read a number of `width` bytes."""
        return int.from_bytes(self.take(width), "little")

    def take_counted(self, width: int) -> bytes:
        """Read a number of `width` bytes, and as many bytes as it says."""
        return self.take(self.take_count(width))

    def take_line(self) -> str:
        """Read the text up to the end of the line."""
        end = self.data.find(b"\n", self.position)
        if end < 0:
            raise TruncatedError("a line continues after the end of the data")
        return self.take(end + 1 - self.position)[:-1].decode()

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def find_target(self, kind: type, action: str) -> Any:
        """Return the container at the top of the stack; None for an unknown object.

        Raises:
            FormatError: it is not of this kind.
        """
        target = self.stack[-1]
        if isinstance(target, UnknownObject):
            return None
        if not isinstance(target, kind):
            raise FormatError(f"it {action} a {type(target).__name__}")
        return target

    def refuse_hostile_keys(self, target: object, new_keys: Sequence[object]) -> None:
        """Check the hashes of keys before they are added to a dict or set; see `KeyCounter.add`.

        Raises:
            UnsafeValueError: too many keys have the same hash.
        """
        if _TEXT.issuperset(map(type, new_keys)):
            return  # the usual keys, whose hashes a file cannot choose
        # The target is kept alive, so that its id stays unique.
        _, counter = self._key_counters.setdefault(id(target), (target, KeyCounter()))
        counter.add(new_keys)

    def resolve_global(self, module: str, name: str) -> object:
        """Return the value of a global name; a placeholder if the name is not in `allowed`."""
        if (value := self.globals.get((module, name))) is None:
            full_name = f"{_RENAMED_MODULES.get(module, module)}.{name}"
            value = self.allowed.get(full_name) or find_class(module, name)
            if value is None:
                self.unknown_names.add(full_name[:200])
                value = UnknownObject(full_name[:200])
            elif not isinstance(value, (torch.dtype, AllowedCallable)):
                value = AllowedCallable(full_name, value)
            self.globals[module, name] = value
        return value

    def call(self, constructor: object, args: object) -> object:
        """Call an allowed class or function, and return the value that it constructs.

        If it cannot be constructed from an `UnknownObject`, return this object.

        Raises:
            FormatError: `constructor` is not a class or function, or the arguments are invalid.
        """
        if isinstance(constructor, UnknownObject):
            return constructor
        if not isinstance(constructor, AllowedCallable) or not isinstance(args, tuple):
            raise FormatError("it calls a value that is not a class or function")
        try:
            made = constructor.construct(*args)
            if isinstance(made, UnknownObject):
                self.unknown_names.add(made.name)
            return made
        except MALFORMED_ERRORS as error:
            if isinstance(error, (FormatError, UnsafeValueError)):
                raise
            if (unknown := find_unknown(args)) is not None:
                return unknown
            raise FormatError(f"invalid arguments of {constructor.name}: {error}") from error


def _refuse_opcode(machine: PickleMachine) -> None:
    code = machine.data[machine.position - 1]
    opcode = next((op for op in pickletools.opcodes if op.code == chr(code)), None)
    if opcode is None:
        raise FormatError(f"byte {code:#04x} is not an opcode")
    raise UnsupportedValueError(
        f"opcode {opcode.name} of protocol {opcode.proto}, which torch.save does not write",
        f"save with torch.save, or with pickle protocol 2 to {NEWEST_PROTOCOL}",
    )


def _read_protocol(machine: PickleMachine) -> None:
    version = machine.take_count(1)
    if version > NEWEST_PROTOCOL:
        raise UnsupportedValueError(
            f"pickle protocol {version}", f"save with protocol {NEWEST_PROTOCOL}"
        )


def _read_frame(machine: PickleMachine) -> None:
    size = machine.take_count(8)
    if size > len(machine.data) - machine.position:
        raise TruncatedError("a frame continues after the end of the data")


def _pop_top(machine: PickleMachine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _memoize(machine: PickleMachine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _push(read: Callable[[PickleMachine], object]) -> Operation:
    return lambda machine: machine.stack.append(read(machine))


def _push_text(width: int) -> Operation:
    return _push(lambda machine: machine.take_counted(width).decode("utf-8", "surrogatepass"))


def _push_bytes(width: int, kind: type[bytes | bytearray] = bytes) -> Operation:
    return _push(lambda machine: kind(machine.take_counted(width)))


def _push_integer(width: int) -> Operation:
    return _push(lambda machine: int.from_bytes(machine.take_counted(width), "little", signed=True))


def _push_python2_text(width: int) -> Operation:
    def read(machine: PickleMachine) -> str | bytes:
        data = machine.take_counted(width)
        with suppress(UnicodeDecodeError):  # Python 2 stored text and bytes with the same opcode
            return data.decode()
        return data

    return _push(read)


def _build_tuple(count: int) -> Operation:
    def build(machine: PickleMachine) -> None:
        if len(machine.stack) < count:
            raise IndexError("the stack is empty")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return build


def _append_items(machine: PickleMachine, items: list[Any]) -> None:
    if (target := machine.find_target(list, "appends to")) is not None:
        target += items


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update_dict(machine, [key, value])


def _update_dict(machine: PickleMachine, items: list[Any]) -> None:
    keys = items[::2]
    if (target := machine.find_target(dict, "sets items of")) is not None:
        machine.refuse_hostile_keys(target, keys)
        target.update(zip(keys, items[1::2], strict=True))


def _add_to_set(machine: PickleMachine) -> None:
    items = machine.pop_to_mark()
    if (target := machine.find_target(set, "adds to")) is not None:
        machine.refuse_hostile_keys(target, items)
        target.update(items)


def _build_frozenset(machine: PickleMachine) -> None:
    items = machine.pop_to_mark()
    machine.refuse_hostile_keys(items, items)
    machine.stack.append(frozenset(items))


def _push_stack_global(machine: PickleMachine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError("the name of a class is not text")
    machine.stack.append(machine.resolve_global(module, name))


def _call(machine: PickleMachine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)


def _call_with_keywords(machine: PickleMachine) -> None:
    if machine.stack.pop() and not isinstance(machine.stack[-2], UnknownObject):
        raise UnsupportedValueError("a value that is constructed with keyword arguments")
    _call(machine)


def _set_state(machine: PickleMachine) -> None:
    state = machine.stack.pop()
    try:
        set_state(machine.stack[-1], state)
    except MALFORMED_ERRORS as error:
        if (unknown := find_unknown(state)) is None:
            raise
        raise UnsupportedValueError(
            f"a value that consists of objects of {unknown.name}"
        ) from error


def _load_persistent(machine: PickleMachine) -> None:
    if machine.persistent_load is None:
        raise FormatError("the pickle refers to a storage, but the file contains none")
    machine.stack[-1] = machine.persistent_load(machine.stack[-1])


def _make_operation_table() -> list[Operation]:
    table: list[Operation] = [_refuse_opcode] * 256
    for code, operation in {
        pickle.PROTO: _read_protocol,
        pickle.FRAME: _read_frame,
        pickle.POP: _pop_top,
        pickle.POP_MARK: lambda machine: machine.pop_to_mark(),
        pickle.DUP: _push(lambda machine: machine.stack[-1]),
        pickle.MEMOIZE: _memoize,
        pickle.NONE: _push(lambda _: None),
        pickle.NEWTRUE: _push(lambda _: True),
        pickle.NEWFALSE: _push(lambda _: False),
        pickle.EMPTY_TUPLE: _push(lambda _: ()),
        pickle.EMPTY_LIST: _push(lambda _: []),
        pickle.EMPTY_DICT: _push(lambda _: {}),
        pickle.EMPTY_SET: _push(lambda _: set()),
        pickle.BININT: _push(
            lambda machine: int.from_bytes(machine.take(4), "little", signed=True)
        ),
        pickle.BINFLOAT: _push(lambda machine: struct.unpack(">d", machine.take(8))[0]),
        pickle.LONG1: _push_integer(1),
        pickle.LONG4: _push_integer(4),
        pickle.SHORT_BINUNICODE: _push_text(1),
        pickle.BINUNICODE8: _push_text(8),
        pickle.SHORT_BINBYTES: _push_bytes(1),
        pickle.BINBYTES: _push_bytes(4),
        pickle.BINBYTES8: _push_bytes(8),
        pickle.BYTEARRAY8: _push_bytes(8, bytearray),
        pickle.SHORT_BINSTRING: _push_python2_text(1),
        pickle.BINSTRING: _push_python2_text(4),
        pickle.TUPLE1: _build_tuple(1),
        pickle.TUPLE3: _build_tuple(3),
        pickle.APPEND: lambda machine: _append_items(machine, [machine.stack.pop()]),
        pickle.APPENDS: lambda machine: _append_items(machine, machine.pop_to_mark()),
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: lambda machine: _update_dict(machine, machine.pop_to_mark()),
        pickle.ADDITEMS: _add_to_set,
        pickle.FROZENSET: _build_frozenset,
        pickle.GLOBAL: _push(
            lambda machine: machine.resolve_global(machine.take_line(), machine.take_line())
        ),
        pickle.STACK_GLOBAL: _push_stack_global,
        pickle.REDUCE: _call,
        pickle.NEWOBJ: _call,  # both call an `AllowedCallable`
        pickle.NEWOBJ_EX: _call_with_keywords,
        pickle.BUILD: _set_state,
        pickle.BINPERSID: _load_persistent,
    }.items():
        table[code[0]] = operation
    return table


OPERATIONS = _make_operation_table()
"""The operation of each opcode, except the opcodes that `pickles.unpickle` runs without it.

Opcodes of protocol 0, of registered extensions and of out-of-band buffers are refused."""
