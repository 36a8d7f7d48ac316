"""Values that are small as they are stored, and huge or endless to whoever walks through them."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import FormatError
from shardwise.formats.stored.pickled import Record

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
