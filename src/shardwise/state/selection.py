"""The names that a load selects by patterns."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwise.errors import StateError
from shardwise.state.leaves import LocalState


@dataclass(frozen=True, slots=True)
class Selection:
    """Shell patterns: a name is selected if it matches `only`, if given, and not `skip`."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @classmethod
    def by(cls, only: Iterable[str], skip: Iterable[str]) -> Selection:
        """Return the selection by lists of patterns.

        Raises:
            StateError: an argument is not a list of patterns.
        """
        for name, patterns in (("only", only), ("skip", skip)):
            listed = isinstance(patterns, Iterable) and not isinstance(patterns, str)
            if not listed or not all(isinstance(each, str) for each in patterns):
                raise StateError(f"{name}={patterns!r}: expected a list of patterns")
        return cls(tuple(only), tuple(skip))

    def chooses(self, *names: str) -> bool:
        """Return whether a name is selected.

        Several names that belong together are selected if any matches `only` and none `skip`.
        """
        if self.only and not _any_matches(names, self.only):
            return False
        return not _any_matches(names, self.skip)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        return [each for each in (*self.only, *self.skip) if not _any_matches(names, [each])]

    def of(self, held: LocalState) -> LocalState:
        """What is chosen of a local state; the names of the others are left."""
        if not (self.only or self.skip):
            return held
        left = [name for name in held.names() if not self.chooses(name)]
        return LocalState(
            [leaf for leaf in held.tensors if self.chooses(leaf.name)],
            {name: value for name, value in held.objects.items() if self.chooses(name)},
            {name: value for name, value in held.grouped.items() if self.chooses(name)},
            {name: value for name, value in held.per_rank.items() if self.chooses(name)},
            held.problems,
            [*held.left, *left],
        )


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def is_below(name: str, scope: Set[str]) -> bool:
    """Return whether a name is in `scope`, or below a name in it."""
    while name not in scope:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True
