"""Values that DCP took apart, put together again where nothing in them is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.formats.laying.optimizers import Path, is_of_optimizer


def fold(values: Mapping[Path, Any], tensors: Iterable[Path]) -> dict[Path, Any]:
    """The same values; dicts and lists without tensors are one value each.

    So is the state of a scheduler or a loader one value, which it takes on as a whole. What is
    of an optimizer stays as it is.
    """
    sharded = {path[:n] for path in tensors for n in range(1, len(path) + 1)}
    folded: dict[Path, Any] = {}
    for path, value in values.items():
        cut = next((n for n in range(1, len(path)) if path[:n] not in sharded), len(path))
        if cut == len(path) or is_of_optimizer(path):
            folded[path] = value
            continue
        here = folded.setdefault(path[:cut], {})
        for part in path[cut:-1]:
            here = here.setdefault(part, {})
        here[path[-1]] = value
    return {
        path: with_lists(value) if path not in values else value for path, value in folded.items()
    }


def with_lists(value: Any) -> Any:
    """Dicts with the keys 0, 1, … (as numbers) as the lists that they were."""
    if not isinstance(value, dict):
        return value
    made = {key: with_lists(each) for key, each in value.items()}
    numbered = len(made) > 0 and all(type(key) is int for key in made)
    return [made[key] for key in sorted(made)] if numbered else made
