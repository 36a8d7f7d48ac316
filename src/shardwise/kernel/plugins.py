"""Find what other packages add to the ports of shardwise, by entry points.

A package that is broken disturbs only programs that use it. `SHARDWISE_PLUGINS=off` ignores all of
them, and `SHARDWISE_PLUGINS=one,two` all but the packages of these names.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions, entry_points
from typing import Any, TypeVar

from shardwise.kernel.errors import ShardwiseError, StateError
from shardwise.ports.built_in import BUILT_IN

T = TypeVar("T")
SWITCH = "SHARDWISE_PLUGINS"
_ADVICE = (
    f"update or uninstall the package, or set {SWITCH} to the names of the packages to use, "
    f"separated by commas, or to {SWITCH}=off"
)

log = logging.getLogger("shardwise")


class PluginError(StateError):
    """The code of another package, which an entry point names, has failed."""


def built_in(group: str) -> Sequence[EntryPoint]:
    """Return what shardwise itself has for a group. Import nothing of it."""
    return [EntryPoint(name, value, group) for name, value in BUILT_IN.get(group, {}).items()]


def load_built_in(group: str, name: str) -> Any:
    """Import what shardwise itself has for a group under a name."""
    return EntryPoint(name, BUILT_IN[group][name], group).load()


def find_plugins(group: str) -> Sequence[EntryPoint]:
    """Return the entry points of a group, such as `shardwise.stores`. Import none of them.

    They are sorted by name and package. Packages can use the same name.
    """
    return _find_plugins(group, tuple(sys.path), os.environ.get(SWITCH, ""))


def find_plugin(group: str, name: str) -> EntryPoint | None:
    """Return the entry point of a name; None if there is none.

    Raises:
        StateError: two packages have an entry point of this name.
    """
    found = [entry for entry in find_plugins(group) if entry.name == name]
    if len(found) > 1:
        packages = " and ".join(f"{package_of(entry)} ({entry.value})" for entry in found)
        raise StateError(f"several packages provide {group} {name!r}: {packages}; {_ADVICE}")
    return found[0] if found else None


@lru_cache
def _find_plugins(group: str, search_path: tuple[str, ...], switch: str) -> Sequence[EntryPoint]:
    """Find the entry points on a search path. This reads the metadata of all installed packages."""
    if switch == "off":
        return ()
    wanted = {_normalized(name) for name in switch.split(",") if name.strip()}
    found = {
        (entry.name, entry.value): entry
        for entry in _entry_points(group)
        if not wanted or _normalized(package_of(entry)) in wanted
    }
    return sorted(found.values(), key=lambda entry: (entry.name, package_of(entry)))


def _entry_points(group: str) -> Iterator[EntryPoint]:
    """Yield the entry points of all packages whose metadata can be read."""
    try:
        yield from entry_points(group=group)
    except Exception:  # some package has entry points that nobody can read
        for package in distributions():
            try:
                yield from package.entry_points.select(group=group)
            except Exception as error:  # noqa: PERF203 - rare
                _warn_once(
                    f"the entry points of the package {package.name} cannot be read: "
                    f"{type(error).__name__}: {error}; shardwise ignores the package"
                )


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package.strip()).lower()


def load_plugin(entry: EntryPoint) -> Any:
    """Import the object of an entry point.

    Raises:
        PluginError: the import fails. The error names the package.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the package {package_of(entry)} provides {entry.group} {entry.name!r}, but its "
            f"{entry.value} cannot be imported: {type(error).__name__}: {error}; {_ADVICE}"
        ) from error


def failure_of(entry: EntryPoint, error: BaseException) -> PluginError:
    """Return the error of a plug-in that has failed."""
    return PluginError(
        f"the package {package_of(entry)} provides {entry.group} {entry.name!r}, but "
        f"{entry.value} failed: {type(error).__name__}: {error}; {_ADVICE}"
    )


def ignore_failure(error: StateError) -> None:
    """Log once that a plug-in is ignored, because it has failed where it is not needed."""
    _warn_once(f"ignored: {error}")


@lru_cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def package_of(entry: EntryPoint) -> str:
    """Return the name of the package that provides an entry point."""
    return entry.dist.name if entry.dist is not None else "(unknown)"


def call_plugin(entry: EntryPoint, kind: type[T], *arguments: object) -> T | None:
    """Call the function of an entry point, and return what it made; None if it made nothing.

    Args:
        entry: the entry point.
        kind: what the function returns, unless it returns None.
        arguments: the arguments of the function.

    Raises:
        PluginError: the import or the call fails, or the function returns something else. The error
            names the package.
        ShardwiseError, OSError: the function raised it.
    """
    function = load_plugin(entry)
    try:
        made = function(*arguments)
    except (ShardwiseError, OSError):
        raise
    except (Exception, SystemExit) as error:
        raise failure_of(entry, error) from error
    if made is not None and not isinstance(made, kind):
        raise PluginError(
            f"the package {package_of(entry)} provides {entry.group} {entry.name!r}, but "
            f"{entry.value} returned a {type(made).__name__} instead of a {kind.__name__}: see the "
            "page of this port in the documentation"
        )
    return made
