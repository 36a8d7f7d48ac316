"""Reads pickles, and runs nothing: an interpreter that knows values, and names of a closed list.

Python's own unpickler trusts whatever its list lets through: with attributes set on classes, calls
of what was made, and tables allocated by a number in the file. Here a class or function is a name
and nothing else, so that there is nothing to call, and no object whose attributes do anything.
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
    """What a pickle holds; `opaque` are the names that were not on the list; `end` is in bytes."""

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
    """The value of a pickle, which is not trusted.

    Args:
        where: what the bytes are, for messages.
        stubs: what is on the list beside `ALLOWED`.
        persistent: gives values by persistent ids, as torch stores storages.
        opaque: let `Opaque` stand for what is not on the list, instead of refusing.
        unfolded: refuse what is huge, or endless, to whoever walks through all of it; without it,
            that is for the caller to see to, who looks only for what it knows.

    Raises:
        FormatError: it is malformed, nested without end or within itself, or names what is not on
            the list (the message has all names).
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
            f"{where}: it names what is not read from pickles: {', '.join(names[:_NAMES_SHOWN])}"
            f"{more}; nothing of it was run. Save without it, or leave it out by skip_unknown=True"
        )
    return Pickled(value, names, end)


def _run(machine: Machine, at: int) -> tuple[object, int]:
    """The value, and where the pickle ends. The commonest opcodes are spelled out here."""
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
        if at + 8 > size:  # no argument of fixed length is longer
            raise CutOffError("it is cut off") from error
        raise FormatError(f"this is no pickle that makes sense (byte {at}): {error}") from error
    raise CutOffError("it is cut off")
