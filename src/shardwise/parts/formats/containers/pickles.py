"""A safe reader of pickles: an interpreter that constructs only values of allowed types.

Python's `Unpickler` trusts everything that `find_class` returns: pickles set attributes of classes,
call values, and choose the size of allocations. In this interpreter, a class or function is only an
allowed name. A pickle cannot call Python's own classes and functions, and setting attributes
has no effect outside of the returned value.
"""

from __future__ import annotations

from typing import Any

from shardwise.kernel.errors import FormatError
from shardwise.kernel.state.hostile_keys import UnsafeValueError
from shardwise.parts.formats.containers.pickle_opcodes import (
    OPERATIONS,
    PersistentLoad,
    PickleMachine,
)
from shardwise.parts.formats.containers.pickle_values import (
    ALLOWED_NAMES,
    MALFORMED_ERRORS,
    AllowedNames,
    PickledInstance,
    TruncatedError,
    UnknownClassError,
    UnknownObject,
    explain_error,
    list_parts,
)
from shardwise.parts.formats.foreign import StoredComposite

MOST_NAMES_SHOWN = 20
_MOST_PLACES_SHOWN = 4
_MOST_VALUES_SEARCHED = 2**16
MOST_DEPTH = 100
_CONTAINERS = (dict, list, tuple, set, frozenset, PickledInstance, slice, StoredComposite)


def unpickle(
    data: bytes,
    source: str,
    *,
    also_allowed: AllowedNames | None = None,
    persistent_load: PersistentLoad | None = None,
    skip_unknown: bool = False,
    start: int = 0,
    refuse_huge_values: bool = True,
) -> tuple[Any, int]:
    """Read an untrusted pickle.

    Args:
        data: bytes that contain the pickle.
        source: the path of the file or a description of the data, for messages.
        also_allowed: names that are allowed in addition to `ALLOWED_NAMES`.
        persistent_load: a function that returns the value of a persistent id. Torch pickles
            storages as persistent ids.
        skip_unknown: replace objects that are not allowed with `UnknownObject`, instead of
            refusing the pickle.
        start: the offset of the pickle in the data, in bytes.
        refuse_huge_values: refuse values that become huge or endless when a reader follows their
            references. Set it to False only if the caller does not walk through the value.

    Returns:
        The value of the pickle, and the offset of the end of the pickle, in bytes.

    Raises:
        FormatError: the pickle is damaged, contains unsupported values, or would take too much time
            or memory.
        UnknownClassError: it uses names that are not allowed; the message contains the names.
    """
    machine = PickleMachine(data, {**ALLOWED_NAMES, **(also_allowed or {})}, persistent_load)
    try:
        value, end = _run_opcodes(machine, start)
        if refuse_huge_values:
            try:
                check_expanded_size(value, 2**20 + 4 * len(data))
            except UnsafeValueError as error:
                raise explain_error(error, f"the pickle that ends at byte {end}") from error
    except FormatError as error:
        raise type(error)(f"{source}: {error}") from error  # the opcodes do not know the path
    unknown_names = tuple(sorted(machine.unknown_names))
    if unknown_names and not skip_unknown:
        more = (
            f" and {len(unknown_names) - MOST_NAMES_SHOWN} more"
            if len(unknown_names) > MOST_NAMES_SHOWN
            else ""
        )
        names = f"{', '.join(unknown_names[:MOST_NAMES_SHOWN])}{more}"
        raise UnknownClassError(
            f"{source}: contains objects of classes that shardwise does not read: {names}"
            f"{_places_of_unknown(value)}; "
            "shardwise ran no code from the file. Save plain values and tensors instead, such as "
            "model.state_dict() in place of a model, or tensor.dequantize() in place of a tensor "
            "of another class; or leave the objects out with skip_unknown=True",
            names,
        )
    return value, end


def _places_of_unknown(value: object) -> str:
    """Return where the first unknown objects in dicts and lists are: ` (at model.w, list.0)`."""
    found: list[str] = []
    stack: list[tuple[tuple[object, ...], object]] = [((), value)]
    for _ in range(_MOST_VALUES_SEARCHED):
        if not stack or len(found) == _MOST_PLACES_SHOWN:
            break
        path, current = stack.pop()
        if isinstance(current, UnknownObject) and path:
            found.append(".".join(str(part)[:100] for part in path))
        pairs = current.items() if isinstance(current, dict) else enumerate(list_parts(current))
        is_known = isinstance(current, (dict, list, tuple))
        stack += reversed(
            [((*path, k), v) for k, v in pairs if is_known and len(path) < MOST_DEPTH]
        )
    return f" (at {', '.join(found)})" if found else ""


def _run_opcodes(machine: PickleMachine, position: int) -> tuple[object, int]:
    """Run the opcodes of a pickle; return its value, and the offset of its end, in bytes.

    The most frequent opcodes are inlined.
    """
    data, stack, memo, size = machine.data, machine.stack, machine.memo, len(machine.data)
    try:
        while position < size:
            opcode = data[position]
            position += 1
            if opcode == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[position : position + 4], "little")] = stack[-1]
                position += 4
            elif opcode == 0x68:  # BINGET
                stack.append(memo[data[position]])
                position += 1
            elif opcode == 0x28:  # MARK
                machine.marks.append(len(stack))
            elif opcode == 0x58:  # BINUNICODE
                end = position + 4 + int.from_bytes(data[position : position + 4], "little")
                if end > size:
                    raise TruncatedError("a text continues after the end of the data")
                stack.append(data[position + 4 : end].decode("utf-8", "surrogatepass"))
                position = end
            elif opcode == 0x74:  # TUPLE
                mark = machine.marks.pop()
                items = tuple(stack[mark:])
                del stack[mark:]
                stack.append(items)
            elif opcode == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif opcode == 0x4D:  # BININT2
                stack.append(int.from_bytes(data[position : position + 2], "little"))
                position += 2
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                position += 4
            elif opcode == 0x86:  # TUPLE2
                second, first = stack.pop(), stack.pop()
                stack.append((first, second))
            elif opcode == 0x71:  # BINPUT
                memo[data[position]] = stack[-1]
                position += 1
            elif opcode == 0x2E:  # STOP
                (value,) = stack
                if machine.marks:
                    raise FormatError("it ends within a value")
                return value, position
            else:
                machine.position = position
                OPERATIONS[opcode](machine)
                position = machine.position
        raise TruncatedError("it ends before its last opcode")
    except MALFORMED_ERRORS as error:
        is_explained = isinstance(error, (FormatError, UnsafeValueError))
        if not is_explained and position + 8 > size:
            # No argument of a fixed length is longer than 8 bytes.
            error = TruncatedError("an argument continues after the end of the data")
        raise explain_error(error, _describe_position(machine, position)) from error


def _describe_position(machine: PickleMachine, position: int) -> str:
    """Return the position in the pickle, and the last text before it, which is often a key."""
    key = next((value for value in reversed(machine.stack) if type(value) is str), None)
    return f"byte {position} of the pickle" + (f", near {key[:60]!r}" if key else "")


def check_expanded_size(value: object, max_values: int) -> None:
    """Refuse values that are small in the file, but huge or endless if references are followed.

    Args:
        max_values: the largest number of values, where each reference counts as a copy.

    Raises:
        UnsafeValueError: there are more values, nesting is deeper than `MOST_DEPTH`, or a value
            contains itself.
    """
    sizes_and_depths: dict[int, tuple[int, int]] = {}  # by id: size and depth
    open_ids: set[int] = set()
    stack = [(value, False)]
    while stack:
        current, children_done = stack.pop()
        if id(current) in sizes_and_depths:
            continue
        parts = list_parts(current)
        containers = [part for part in parts if isinstance(part, _CONTAINERS)]
        if children_done or not containers:
            open_ids.discard(id(current))
            child_sizes = [sizes_and_depths[id(part)] for part in containers]
            size = 1 + len(parts) + sum(n for n, _ in child_sizes)
            depth = 1 + max((n for _, n in child_sizes), default=0)
            if size > max_values or depth > MOST_DEPTH:
                raise UnsafeValueError(
                    f"values are nested more than {MOST_DEPTH} deep, or repeat each other so often "
                    f"that they expand to more than {max_values} values"
                )
            sizes_and_depths[id(current)] = size, depth
        elif id(current) in open_ids:
            raise UnsafeValueError("a value contains itself")
        elif len(open_ids) > MOST_DEPTH:
            raise UnsafeValueError(f"values are nested more than {MOST_DEPTH} deep")
        else:
            open_ids.add(id(current))
            stack.append((current, True))
            stack += [(part, False) for part in containers]
