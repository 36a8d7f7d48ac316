"""Walks through the parts of values from pickles."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.formats.containers.pickle_errors import UnsafeValueError
from shardwise.formats.containers.pickle_values import PickledInstance, UnknownObject


def find_unknown(value: object) -> UnknownObject | None:
    """Return an `UnknownObject` among the first 1000 parts of a value; None if there is none."""
    values = [value]
    for found in values:
        if isinstance(found, UnknownObject):
            return found
        values += _list_children(found)[: max(0, 1000 - len(values))]
    return None


MOST_DEPTH = 100
_CONTAINERS = (dict, list, tuple, set, frozenset, PickledInstance, slice)


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
        parts = _list_children(current)
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


def _list_children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, PickledInstance):
        return [*value.args, *value.fields.values()]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return list(value) if isinstance(value, (list, tuple, set, frozenset)) else []
