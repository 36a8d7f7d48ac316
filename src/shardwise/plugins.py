"""Find what other packages add to the ports of shardwise, by entry points."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from shardwise.errors import ShardwiseError, StateError

T = TypeVar("T")


def find_plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, such as `shardwise.stores`, by name. Import none of them.

    Raises:
        StateError: two packages have an entry point of the same name.
    """
    return _find_plugins(group, tuple(sys.path))


@lru_cache
def _find_plugins(group: str, search_path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    """Find the entry points on a search path. This reads the metadata of all installed packages."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise StateError(
                f"two packages provide {group} {entry.name!r}: {_package(other)} ({other.value}) "
                f"and {_package(entry)} ({entry.value}); uninstall one of them"
            )
    return found


def load_plugin(entry: EntryPoint) -> Any:
    """Import the object of an entry point.

    Raises:
        StateError: the import fails. The error names the package.
    """
    try:
        return entry.load()
    except Exception as error:
        raise StateError(
            f"the package {_package(entry)} provides {entry.group} {entry.name!r}, but its "
            f"{entry.value} cannot be imported: {type(error).__name__}: {error}; update or "
            "uninstall the package"
        ) from error


def call_plugin(entry: EntryPoint, kind: type[T], *arguments: object) -> T | None:
    """Call the function of an entry point, and return what it made; None if it made nothing.

    Args:
        entry: the entry point.
        kind: what the function returns, unless it returns None.
        arguments: the arguments of the function.

    Raises:
        StateError: the import or the call fails, or the function returns something else. The error
            names the package.
        ShardwiseError, OSError: the function raised it.
    """
    function = load_plugin(entry)
    try:
        made = function(*arguments)
    except (ShardwiseError, OSError):
        raise
    except Exception as error:
        raise StateError(
            f"the package {_package(entry)} provides {entry.group} {entry.name!r}, but "
            f"{entry.value} failed: {type(error).__name__}: {error}; correct or uninstall it"
        ) from error
    if made is not None and not isinstance(made, kind):
        raise StateError(
            f"the package {_package(entry)} provides {entry.group} {entry.name!r}, but "
            f"{entry.value} returned a {type(made).__name__} instead of a {kind.__name__}: see the "
            "page of this port in the documentation"
        )
    return made


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "(unknown)"
