"""A safe reader of pickles: an interpreter that creates values and names from a closed list.

Python's `Unpickler` trusts everything that `find_class` returns: pickles set attributes of classes,
call values, and choose the size of allocations. In this interpreter a class or function is only a
name, so a pickle cannot call anything, and no object has attributes with an effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_opcodes import (
    OPERATIONS,
    SENSELESS,
    CutOffError,
    Machine,
    Persistent,
)
from shardwise.formats.containers.pickle_values import ALLOWED, Stubs, check_unfolded

_NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Pickled:
    """The value of a pickle, the names that are not on the list, and the offset of its end."""

    value: Any
    opaque: tuple[str, ...]
    end: int


def unpickle(
    data: bytes,
    where: str,
    *,
    stubs: Stubs | None = None,
    persistent: Persistent | None = None,
    opaque: bool = False,
    start: int = 0,
    unfolded: bool = True,
) -> Pickled:
    """Read an untrusted pickle.

    Args:
        where: a description of the data, for messages.
        stubs: names that are allowed in addition to `ALLOWED`.
        persistent: returns the value of a persistent id, which torch uses for storages.
        opaque: replace values of names that are not on the list by `Opaque`, instead of refusing.
        start: the offset of the pickle.
        unfolded: refuse values that are huge or endless to walk through; callers that look only
            for what they know can do without.

    Raises:
        FormatError: the pickle is malformed, nested too deeply, or uses names that are not on the
            list; the message has the names.
    """
    machine = Machine(data, {**ALLOWED, **(stubs or {})}, persistent)
    try:
        value, end = _run(machine, start)
        if unfolded:
            check_unfolded(value, 2**20 + 4 * len(data))
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from error
    names = tuple(sorted(machine.unknown))
    if names and not opaque:
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        raise FormatError(
            f"{where}: it contains objects that are not read from pickles: "
            f"{', '.join(names[:_NAMES_SHOWN])}{more}; nothing of it was run. Save without "
            "them, or leave them out with skip_unknown=True"
        )
    return Pickled(value, names, end)


def _run(machine: Machine, at: int) -> tuple[object, int]:
    """Run a pickle; return its value and its end. The most frequent opcodes are inlined."""
    data, stack, memo, size = machine.data, machine.stack, machine.memo, len(machine.data)
    try:
        while at < size:
            op = data[at]
            at += 1
            if op == 0x72:  # LONG_BINPUT
                memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
                at += 4
            elif op == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif op == 0x28:  # MARK
                machine.marks.append(len(stack))
            elif op == 0x58:  # BINUNICODE
                end = at + 4 + int.from_bytes(data[at : at + 4], "little")
                if end > size:
                    raise CutOffError("it is cut off, or a length in it lies")
                stack.append(data[at + 4 : end].decode("utf-8", "surrogatepass"))
                at = end
            elif op == 0x74:  # TUPLE
                mark = machine.marks.pop()
                items = tuple(stack[mark:])
                del stack[mark:]
                stack.append(items)
            elif op == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif op == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif op == 0x2E:  # STOP
                (value,) = stack
                if machine.marks:
                    raise FormatError("it ends within a value")
                return value, at
            else:
                at = OPERATIONS[op](machine, at)
    except FormatError:
        raise
    except SENSELESS as error:
        if at + 8 > size:  # no fixed-length argument is longer than 8 bytes
            raise CutOffError("it is cut off") from error
        raise FormatError(f"malformed pickle (byte {at}): {error}") from error
    raise CutOffError("it is cut off")
