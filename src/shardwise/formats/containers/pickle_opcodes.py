"""The opcodes of pickles, as functions that change a `PickleMachine`, and run no code of them."""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_errors import (
    MALFORMED_ERRORS,
    TruncatedError,
    UnsafeValueError,
    UnsupportedValueError,
)
from shardwise.formats.containers.pickle_parts import find_unknown
from shardwise.formats.containers.pickle_values import (
    AllowedCallable,
    AllowedNames,
    Constant,
    UnknownObject,
    set_state,
)
from shardwise.state.hostile_keys import SAFE_KEY_TYPES, KeyCounter, UnsafeKeysError

NEWEST_PROTOCOL = 5
_RENAMED_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}

PersistentLoad: TypeAlias = Callable[[Any], object]
"""A function that returns the value of a persistent id, or raises one of `MALFORMED_ERRORS`."""
Operation: TypeAlias = Callable[["PickleMachine", int], int]
"""A function that runs an opcode.

It takes the position of the opcode's argument, and returns the position of the next opcode."""


class PickleMachine:
    """The stack, marks and memo of a pickle that is being read.

    Attributes:
        allowed: the global names that the pickle may use.
        globals: the values of the global names that the pickle used so far.
        unknown_names: global names that are not in `allowed`.
    """

    def __init__(
        self, data: bytes, allowed: AllowedNames, persistent_load: PersistentLoad | None
    ) -> None:
        self.data = data
        self.allowed = allowed
        self.persistent_load = persistent_load
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.globals: dict[tuple[str, str], object] = {}
        self.unknown_names: set[str] = set()
        self._key_counters: dict[int, tuple[object, KeyCounter]] = {}

    def read_bytes(self, position: int, count: int) -> bytes:
        """Return `count` bytes from a position; raise TruncatedError if there are fewer."""
        if count > len(self.data) - position:
            raise TruncatedError("a value continues after the end of the data")
        return self.data[position : position + count]

    def read_line(self, position: int) -> tuple[str, int]:
        """Return the text up to the end of the line, and the start of the next line."""
        end = self.data.find(b"\n", position)
        if end < 0:
            raise TruncatedError("a line continues after the end of the data")
        return self.data[position:end].decode(), end + 1

    def refuse_hash_collisions(self, target: object, new_keys: Sequence[object]) -> None:
        """Check the hashes of keys before they are added to a dict or set; see `KeyCounter.add`.

        Raises:
            UnsafeValueError: too many keys have the same hash.
        """
        if SAFE_KEY_TYPES.issuperset(map(type, new_keys)):
            return
        # The target is kept alive, so that its id stays unique.
        _, counter = self._key_counters.setdefault(id(target), (target, KeyCounter()))
        try:
            counter.add(new_keys)
        except UnsafeKeysError as error:
            raise UnsafeValueError(str(error)) from error

    def pop_to_mark(self) -> list[Any]:
        """Remove and return the values above the last mark."""
        mark = self.marks.pop()
        items = self.stack[mark:]
        del self.stack[mark:]
        return items

    def resolve_global(self, module: str, name: str) -> object:
        """Return the value of a global name; a placeholder if the name is not in `allowed`."""
        if (value := self.globals.get((module, name))) is None:
            full_name = f"{_RENAMED_MODULES.get(module, module)}.{name}"
            if (allowed_value := self.allowed.get(full_name)) is None:
                self.unknown_names.add(full_name[:200])
                value = UnknownObject(full_name[:200])
            elif isinstance(allowed_value, Constant):
                value = allowed_value.value
            else:
                value = AllowedCallable(full_name, allowed_value)
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
            return constructor.construct(*args)
        except MALFORMED_ERRORS as error:
            if isinstance(error, FormatError):
                raise
            if isinstance(error, UnsafeKeysError):
                raise UnsafeValueError(str(error)) from error
            if (unknown := find_unknown(args)) is not None:
                return unknown
            raise FormatError(f"invalid arguments of {constructor.name}: {error}") from error


def _refuse_opcode(machine: PickleMachine, position: int) -> int:
    code = machine.data[position - 1]
    opcode = next((op for op in pickletools.opcodes if op.code == chr(code)), None)
    if opcode is None:
        raise FormatError(f"byte {code:#04x} is not an opcode")
    raise UnsupportedValueError(
        f"opcode {opcode.name} of protocol {opcode.proto}, which torch.save does not write",
        f"save with torch.save, or with pickle protocol 2 to {NEWEST_PROTOCOL}",
    )


def _read_protocol(machine: PickleMachine, position: int) -> int:
    version = machine.data[position]
    if version > NEWEST_PROTOCOL:
        raise UnsupportedValueError(
            f"pickle protocol {version}", f"save with protocol {NEWEST_PROTOCOL}"
        )
    return position + 1


def _read_frame(machine: PickleMachine, position: int) -> int:
    machine.read_bytes(position + 8, int.from_bytes(machine.read_bytes(position, 8), "little"))
    return position + 8


def _pop_top(machine: PickleMachine, position: int) -> int:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()
    return position


def _pop_to_mark(machine: PickleMachine, position: int) -> int:
    machine.pop_to_mark()
    return position


def _duplicate_top(machine: PickleMachine, position: int) -> int:
    machine.stack.append(machine.stack[-1])
    return position


def _get_memo(machine: PickleMachine, position: int) -> int:
    machine.stack.append(machine.memo[int.from_bytes(machine.read_bytes(position, 4), "little")])
    return position + 4


def _memoize(machine: PickleMachine, position: int) -> int:
    machine.memo[len(machine.memo)] = machine.stack[-1]
    return position


def _push_constant(value: object) -> Operation:
    def push(machine: PickleMachine, position: int) -> int:
        machine.stack.append(value)
        return position

    return push


def _push_empty(container_type: type) -> Operation:
    def push(machine: PickleMachine, position: int) -> int:
        machine.stack.append(container_type())
        return position

    return push


def _push_number(struct_format: str) -> Operation:
    number_struct = struct.Struct(struct_format)

    def push(machine: PickleMachine, position: int) -> int:
        machine.stack += number_struct.unpack_from(machine.data, position)
        return position + number_struct.size

    return push


def _push_length_prefixed(width: int, decode: Callable[[bytes], object]) -> Operation:
    def push(machine: PickleMachine, position: int) -> int:
        count = int.from_bytes(machine.read_bytes(position, width), "little")
        machine.stack.append(decode(machine.read_bytes(position + width, count)))
        return position + width + count

    return push


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _decode_python2_text(data: bytes) -> str | bytes:
    with suppress(UnicodeDecodeError):  # Python 2 stored text and bytes with the same opcode
        return data.decode()
    return data


def _decode_integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _build_tuple(count: int) -> Operation:
    def push(machine: PickleMachine, position: int) -> int:
        if len(machine.stack) < count:
            raise IndexError("the stack is empty")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]
        return position

    return push


def _append_item(machine: PickleMachine, position: int) -> int:
    _extend_list(machine, [machine.stack.pop()])
    return position


def _append_items(machine: PickleMachine, position: int) -> int:
    _extend_list(machine, machine.pop_to_mark())
    return position


def _extend_list(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target += items
    elif not isinstance(target, UnknownObject):
        raise FormatError(f"it appends to a {type(target).__name__}")


def _set_item(machine: PickleMachine, position: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update_dict(machine, [key, value])
    return position


def _set_items(machine: PickleMachine, position: int) -> int:
    _update_dict(machine, machine.pop_to_mark())
    return position


def _update_dict(machine: PickleMachine, items: list[Any]) -> None:
    target = machine.stack[-1]
    keys = items[::2]
    if not isinstance(target, dict):
        if isinstance(target, UnknownObject):
            return
        raise FormatError(f"it sets items of a {type(target).__name__}")
    machine.refuse_hash_collisions(target, keys)
    target.update(zip(keys, items[1::2], strict=True))


def _add_to_set(machine: PickleMachine, position: int) -> int:
    items, target = machine.pop_to_mark(), machine.stack[-1]
    if type(target) is set:
        machine.refuse_hash_collisions(target, items)
        target.update(items)
    elif not isinstance(target, UnknownObject):
        raise FormatError(f"it adds to a {type(target).__name__}")
    return position


def _build_frozenset(machine: PickleMachine, position: int) -> int:
    items = machine.pop_to_mark()
    machine.refuse_hash_collisions(items, items)
    machine.stack.append(frozenset(items))
    return position


def _push_global(machine: PickleMachine, position: int) -> int:
    module, position = machine.read_line(position)
    name, position = machine.read_line(position)
    machine.stack.append(machine.resolve_global(module, name))
    return position


def _push_stack_global(machine: PickleMachine, position: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise FormatError("the name of a class is not text")
    machine.stack.append(machine.resolve_global(module, name))
    return position


def _call(machine: PickleMachine, position: int) -> int:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)
    return position


def _call_with_keywords(machine: PickleMachine, position: int) -> int:
    keywords = machine.stack.pop()
    args = machine.stack.pop()
    constructor = machine.stack[-1]
    if keywords and not isinstance(constructor, UnknownObject):
        raise UnsupportedValueError("a value that is constructed with keyword arguments")
    machine.stack[-1] = machine.call(constructor, args)
    return position


def _set_state(machine: PickleMachine, position: int) -> int:
    state = machine.stack.pop()
    try:
        set_state(machine.stack[-1], state)
    except MALFORMED_ERRORS as error:
        if (unknown := find_unknown(state)) is None:
            raise
        raise UnsupportedValueError(
            f"a value that consists of objects of {unknown.name}"
        ) from error
    return position


def _load_persistent(machine: PickleMachine, position: int) -> int:
    if machine.persistent_load is None:
        raise FormatError("the pickle refers to a storage, but the file contains none")
    machine.stack[-1] = machine.persistent_load(machine.stack[-1])
    return position


def _make_operation_table() -> list[Operation]:
    table: list[Operation] = [_refuse_opcode] * 256
    for code, operation in {
        pickle.PROTO: _read_protocol,
        pickle.FRAME: _read_frame,
        pickle.POP: _pop_top,
        pickle.POP_MARK: _pop_to_mark,
        pickle.DUP: _duplicate_top,
        pickle.LONG_BINGET: _get_memo,
        pickle.MEMOIZE: _memoize,
        pickle.NONE: _push_constant(None),
        pickle.NEWTRUE: _push_constant(True),
        pickle.NEWFALSE: _push_constant(False),
        pickle.EMPTY_TUPLE: _push_constant(()),
        pickle.EMPTY_LIST: _push_empty(list),
        pickle.EMPTY_DICT: _push_empty(dict),
        pickle.EMPTY_SET: _push_empty(set),
        pickle.BININT: _push_number("<i"),
        pickle.BININT2: _push_number("<H"),
        pickle.BINFLOAT: _push_number(">d"),
        pickle.LONG1: _push_length_prefixed(1, _decode_integer),
        pickle.LONG4: _push_length_prefixed(4, _decode_integer),
        pickle.SHORT_BINUNICODE: _push_length_prefixed(1, _decode_text),
        pickle.BINUNICODE8: _push_length_prefixed(8, _decode_text),
        pickle.SHORT_BINBYTES: _push_length_prefixed(1, bytes),
        pickle.BINBYTES: _push_length_prefixed(4, bytes),
        pickle.BINBYTES8: _push_length_prefixed(8, bytes),
        pickle.BYTEARRAY8: _push_length_prefixed(8, bytearray),
        pickle.SHORT_BINSTRING: _push_length_prefixed(1, _decode_python2_text),
        pickle.BINSTRING: _push_length_prefixed(4, _decode_python2_text),
        pickle.TUPLE1: _build_tuple(1),
        pickle.TUPLE2: _build_tuple(2),
        pickle.TUPLE3: _build_tuple(3),
        pickle.APPEND: _append_item,
        pickle.APPENDS: _append_items,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: _set_items,
        pickle.ADDITEMS: _add_to_set,
        pickle.FROZENSET: _build_frozenset,
        pickle.GLOBAL: _push_global,
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
"""The operation of each opcode, except the opcodes that `pickles.unpickle` handles without it.

Opcodes of protocol 0, of registered extensions and of out-of-band buffers are refused."""
