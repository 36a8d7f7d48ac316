"""Which names a load is about."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwise.state.leaves import Holdings


@dataclass(frozen=True, slots=True)
class Selection:
    """Shell patterns of names: chosen is what matches `only`, if there is any, and not `skip`."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    def chooses(self, *names: str) -> bool:
        """Whether a name is chosen; of several that go together, any by `only`, none by `skip`."""
        if self.only and not _any_matches(names, self.only):
            return False
        return not _any_matches(names, self.skip)

    def of(self, held: Holdings) -> Holdings:
        """What is chosen of some holdings."""
        if not (self.only or self.skip):
            return held
        return Holdings(
            [leaf for leaf in held.tensors if self.chooses(leaf.name)],
            {name: value for name, value in held.objects.items() if self.chooses(name)},
            {name: value for name, value in held.grouped.items() if self.chooses(name)},
            {name: value for name, value in held.per_rank.items() if self.chooses(name)},
            held.problems,
            held.left,
        )


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def is_below(name: str, scope: Set[str]) -> bool:
    """Whether a name is one of `scope`, or lies below one."""
    while name not in scope:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True
