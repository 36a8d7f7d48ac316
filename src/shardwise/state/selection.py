"""Selection of names by the patterns `only` and `skip`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Set
from fnmatch import translate

from shardwise.errors import StateError
from shardwise.state.leaves import LocalState


class Selection:
    """The names that a load or export selects.

    Args:
        only: shell patterns; if there are any, a selected name matches one of them.
        skip: shell patterns; a selected name matches none of them.

    Raises:
        StateError: `only` or `skip` is not a list of patterns.
    """

    def __init__(self, only: Collection[str] = (), skip: Collection[str] = ()) -> None:
        for name, patterns in (("only", only), ("skip", skip)):
            is_list = isinstance(patterns, Iterable) and not isinstance(patterns, str)
            if not is_list or not all(isinstance(each, str) for each in patterns):
                raise StateError(
                    f"{name}={patterns!r}: expected a list of patterns, for example ['model.*']"
                )
        self._patterns = (*only, *skip)
        self._only = re.compile("|".join(map(translate, only)))  # without patterns, matches all
        self._skip = re.compile("|".join(map(translate, skip))) if skip else None

    def selects(self, *names: str) -> bool:
        """Return whether a name is selected.

        Several names of one value are selected together: if any matches `only`, and none matches
        `skip`.
        """
        is_skipped = self._skip is not None and any(map(self._skip.match, names))
        return not is_skipped and any(map(self._only.match, names))

    def unused_patterns(self, names: Collection[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        return [
            pattern
            for pattern in self._patterns
            if not any(map(re.compile(translate(pattern)).match, names))
        ]

    def select_from(self, local_state: LocalState) -> LocalState:
        """Return the selected part of a local state. Its `unselected` lists all other names."""
        if not self._patterns:
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


def is_below(name: str, scope: Set[str]) -> bool:
    """Return whether a name is in `scope`, or below a name in `scope`."""
    while name not in scope:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return False
    return True
