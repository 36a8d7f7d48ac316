"""Selection of names by the patterns `only` and `skip`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwise.errors import StateError
from shardwise.state.leaves import LocalState


@dataclass(frozen=True, slots=True)
class Selection:
    """The names that a load or export selects.

    Attributes:
        only: shell patterns; if there are any, a selected name matches one of them.
        skip: shell patterns; a selected name matches none of them.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @classmethod
    def from_patterns(cls, only: Iterable[str], skip: Iterable[str]) -> Selection:
        """Return the selection by patterns, after checking their types.

        Raises:
            StateError: `only` or `skip` is not a list of patterns.
        """
        for name, patterns in (("only", only), ("skip", skip)):
            is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str)
            if not is_list or not all(isinstance(each, str) for each in patterns):
                raise StateError(
                    f"{name}={patterns!r}: expected a list of patterns, for example ['model.*']"
                )
        return cls(tuple(only), tuple(skip))

    def selects(self, *names: str) -> bool:
        """Return whether a name is selected.

        Several names of one value are selected together: if any matches `only`, and none matches
        `skip`.
        """
        if self.only and not _any_matches(names, self.only):
            return False
        return not (self.skip and _any_matches(names, self.skip))

    def unused_patterns(self, names: Collection[str]) -> Iterator[str]:
        """Yield the patterns that match none of these names."""
        for pattern in (*self.only, *self.skip):
            if not _any_matches(names, [pattern]):
                yield pattern

    def select_from(self, local_state: LocalState) -> LocalState:
        """Return the selected part of a local state. Its `unselected` lists all other names."""
        if not (self.only or self.skip):
            return local_state
        unselected = [name for name in local_state.names() if not self.selects(name)]
        return LocalState(
            [leaf for leaf in local_state.tensors if self.selects(leaf.name)],
            {name: value for name, value in local_state.objects.items() if self.selects(name)},
            {name: value for name, value in local_state.grouped.items() if self.selects(name)},
            {name: value for name, value in local_state.per_rank.items() if self.selects(name)},
            local_state.problems,
            [*local_state.unselected, *unselected],
        )


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def is_below(name: str, scope: Set[str]) -> bool:
    """Return whether a name is in `scope`, or below a name in `scope`."""
    while name not in scope:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True
