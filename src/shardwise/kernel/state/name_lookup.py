"""Look up names of the target in a checkpoint, and select names by patterns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from fnmatch import translate
from functools import cached_property
from typing import Protocol

import torch

from shardwise.kernel.errors import StateError, add_note
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.local_state import LocalState, TensorLeaf

MOST_COMPARED = 2000  # a comparison of two names takes about 0.1 ms
Rename = Callable[[str], str] | Mapping[str, str]


def rename_function(rename: Rename | None) -> Callable[[str], str]:
    """Return a function from names of the target to names of the checkpoint.

    A mapping renames its keys, and all names below them. The longest matching key counts.

    Raises:
        StateError: `rename` is neither a function nor a mapping of names.
    """
    if rename is None:
        return str  # which returns the name itself
    if callable(rename):
        user_function = rename

        def rename_with_checks(name: str) -> str:
            try:
                saved_name = user_function(name)
            except Exception as error:
                add_note(error, f"{name}: rename= raised this error for this name")
                raise
            if not isinstance(saved_name, str):
                raise StateError(f"{name}: rename= returned {saved_name!r}; expected a name (str)")
            return saved_name

        return rename_with_checks
    if not isinstance(rename, Mapping) or not all(
        isinstance(each, str) for pair in rename.items() for each in pair
    ):
        raise StateError(
            f"rename={rename!r}: expected a function, or a mapping of names, for example "
            "{'model': 'net'}"
        )
    pairs = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def rename_by_prefix(name: str) -> str:
        for target, saved in pairs:
            if name == target or name.startswith(target + "."):
                return saved + name[len(target) :]
        return name

    return rename_by_prefix


class Quantized(Protocol):
    """The quantized tensors of a checkpoint, by their names there."""

    def converts(self, name: str) -> bool:
        """Return whether this load computes the values of a tensor with its scales."""

    def why_not_cast(self, name: str, dtype: torch.dtype) -> str | None:
        """Return why a tensor must not be converted to a dtype; None if it may be."""

    def why_absent(self, name: str) -> str | None:
        """Return how a tensor is stored that the checkpoint has only under other names."""

    def refuse_unscaled(self, missing: Collection[str], unused: Collection[str]) -> Iterable[str]:
        """Yield a line for each tensor that would be left out or loaded without its scales.

        Args:
            missing: the names that the target has and the checkpoint lacks.
            unused: the names of the checkpoint that no rank loads.
        """


class SavedNames:
    """The contents of a checkpoint, looked up by the names of the target.

    Args:
        layout: the checkpoint.
        saved_name: returns the name in the checkpoint, given a name of the target.

    Attributes:
        dequantized: the names of the target whose values this rank computes with scales.
        scale_bytes: the bytes that this rank has read for these scales.
    """

    dequantized: Sequence[str] = ()
    scale_bytes = 0

    def __init__(self, layout: Layout, saved_name: Callable[[str], str] = str) -> None:
        self.layout = layout
        self.saved_name = saved_name
        self._tensors = {tensor.name: i for i, tensor in enumerate(layout.tensors)}
        self._objects = {entry.name: entry.value for entry in layout.objects}

    def tensor(self, name: str) -> TensorEntry | None:
        """Return the entry of a tensor; None if the checkpoint has no tensor of this name."""
        index = self._tensors.get(self.saved_name(name))
        return None if index is None else self.layout.tensors[index]

    def stored_index(self, name: str) -> int:
        """Return the index of the tensor that stores the bytes: this one, or its tied tensor."""
        entry = self.layout.tensors[self._tensors[self.saved_name(name)]]
        return self._tensors[entry.same_as or entry.name]

    def has_object(self, name: str) -> bool:
        """Return whether the checkpoint has a plain value of this name that all ranks share."""
        return self.saved_name(name) in self._objects

    def object(self, name: str) -> object:
        """Return the encoded value of this name, which must exist."""
        return self._objects[self.saved_name(name)]

    def has_per_rank(self, name: str) -> bool:
        """Return whether there is a per-rank value of this name."""
        return self.saved_name(name) in self.layout.per_rank

    def kind(self, name: str) -> str | None:
        """Return "a tensor", "a plain value" or "a per-rank value"; None for an unknown name."""
        if self.tensor(name) is not None:
            return "a tensor"
        if self.has_object(name):
            return "a plain value"
        return "a per-rank value" if self.has_per_rank(name) else None

    def names_below(self, name: str) -> list[str]:
        """Return the names of all tensors and plain values below `name`, without its prefix."""
        return self._names_below.get(self.saved_name(name), [])

    def has_below(self, name: str) -> bool:
        """Return whether there are names below `name`, also of per-rank values."""
        prefix = f"{self.saved_name(name)}."
        return bool(self.names_below(name)) or any(
            each.startswith(prefix) for each in self.layout.per_rank
        )

    def similar_names(self, name: str) -> list[str]:
        """Return names, and first parts of names, in the checkpoint that are spelled similarly."""
        names = self.all_names()
        candidates = [each for each in names if abs(len(each) - len(name)) <= 3][:MOST_COMPARED]
        first_parts = [each.partition(".")[0] for each in names]
        return difflib.get_close_matches(name, [*dict.fromkeys([*candidates, *first_parts])])

    def all_names(self) -> list[str]:
        """Return the names in the checkpoint."""
        return [*self._tensors, *self._objects, *self.layout.per_rank]

    @cached_property
    def quantized(self) -> Quantized:
        """The quantized tensors of the checkpoint."""
        found: Quantized = load_built_in("shardwise.quantized", "find")(self.layout)
        return found

    def as_stored(
        self, leaves: Sequence[TensorLeaf], read: Callable[[Sequence[TensorLeaf]], int]
    ) -> Sequence[TensorLeaf]:
        """Return leaves whose fragments are boxes of the stored tensors.

        Args:
            leaves: matched leaves.
            read: fills leaves by their names in the checkpoint, and returns the bytes read.

        Raises:
            FormatError: scales are invalid.
            MismatchError: names of one memory have different values in the checkpoint.
        """
        return leaves

    @cached_property
    def _names_below(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name in [*self._tensors, *self._objects]:
            dot = name.find(".")
            while dot != -1:
                children.setdefault(name[:dot], []).append(name[dot + 1 :])
                dot = name.find(".", dot + 1)
        return children


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

        If a value has several names (for example, tied weights), pass all of them. The value is
        selected if any name matches `only`, and no name matches `skip`.
        """
        is_skipped = self._skip is not None and any(map(self._skip.match, names))
        return not is_skipped and any(map(self._only.match, names))

    def unused_patterns(self, names: Collection[str]) -> list[str]:
        """Return the patterns that match none of these names."""
        unused = []
        for pattern in self._patterns:
            matches = re.compile(translate(pattern)).match
            if not any(map(matches, names)):
                unused.append(pattern)
        return unused

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
