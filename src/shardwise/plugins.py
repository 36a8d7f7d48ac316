"""Find what other packages add to the ports of shardwise, by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shardwise.errors import StateError


def find_plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group, such as `shardwise.stores`, by name. Import none of them.

    Raises:
        StateError: two packages have an entry point of the same name.
    """
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


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "(unknown)"
