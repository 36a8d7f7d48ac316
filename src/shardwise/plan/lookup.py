"""The contents of a checkpoint, looked up by the names of the target."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType

from shardwise.errors import StateError, add_note
from shardwise.manifest.manifest import Manifest, TensorEntry

MOST_COMPARED = 2000  # each takes about 0.1 ms
Rename = Callable[[str], str] | Mapping[str, str]


def renaming(rename: Rename | None) -> Callable[[str], str]:
    """Return a function from names of the target to names of the checkpoint.

    A mapping renames its keys and all names below them; the longest matching key counts.

    Raises:
        StateError: `rename` is neither a function nor a mapping of names.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return _named_on_failure(rename)
    if not isinstance(rename, Mapping) or not all(
        isinstance(each, str) for pair in rename.items() for each in pair
    ):
        raise StateError(f"rename={rename!r}: expected a function or a mapping of names")
    pairs = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def by_prefix(name: str) -> str:
        for target, saved in pairs:
            if name == target or name.startswith(target + "."):
                return saved + name[len(target) :]
        return name

    return by_prefix


def _named_on_failure(rename: Callable[[str], str]) -> Callable[[str], str]:
    """Wrap the user's function so that its errors and invalid results name their input."""

    def renamed(name: str) -> str:
        try:
            found = rename(name)
        except Exception as error:
            add_note(error, f"{name}: rename= raised this error for this name")
            raise
        if not isinstance(found, str):
            raise StateError(f"{name}: rename= returned {found!r}; expected a name (str)")
        return found

    return renamed


class SavedState:
    """The contents of a checkpoint, looked up by the names of the target.

    Args:
        absent: missing files, by the name that their contents would have.
    """

    def __init__(
        self,
        manifest: Manifest,
        saved_name: Callable[[str], str] = lambda name: name,
        absent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.manifest = manifest
        self.saved_name = saved_name
        self.absent = absent
        self._tensors = {tensor.name: i for i, tensor in enumerate(manifest.tensors)}
        self._objects = {entry.name: entry.value for entry in manifest.objects}

    def tensor(self, name: str) -> TensorEntry | None:
        """Return the entry of a tensor, if there is one."""
        index = self._tensors.get(self.saved_name(name))
        return None if index is None else self.manifest.tensors[index]

    def stored_index(self, name: str) -> int:
        """Return the number of the tensor that has the bytes: this, or the one it is tied to."""
        entry = self.manifest.tensors[self._tensors[self.saved_name(name)]]
        return self._tensors[entry.same_as or entry.name]

    def has_object(self, name: str) -> bool:
        """Return whether there is a shared plain value of this name."""
        return self.saved_name(name) in self._objects

    def object(self, name: str) -> object:
        """Return the encoded value of this name, which must exist."""
        return self._objects[self.saved_name(name)]

    def has_per_rank(self, name: str) -> bool:
        """Return whether each rank has a value of this name."""
        return self.saved_name(name) in self.manifest.per_rank

    def kind(self, name: str) -> str | None:
        """Return the kind of thing that has this name, in words; None if nothing has."""
        if self.tensor(name) is not None:
            return "a tensor"
        if self.has_object(name):
            return "a plain value"
        return "a value of each rank" if self.has_per_rank(name) else None

    def below(self, name: str) -> list[str]:
        """Return the names of all tensors and objects below `name`, relative to it."""
        return self._children.get(self.saved_name(name), [])

    def near(self, name: str) -> list[str]:
        """Return names, and first parts of names, in the checkpoint that are spelled similarly."""
        names = [*self.all_names()]
        known = [each for each in names if abs(len(each) - len(name)) <= 3][:MOST_COMPARED]
        keys = [each.partition(".")[0] for each in names]
        return difflib.get_close_matches(name, [*dict.fromkeys([*known, *keys])])

    def all_names(self) -> Iterable[str]:
        """Yield the names in the checkpoint."""
        yield from self._tensors
        yield from self._objects
        yield from self.manifest.per_rank

    @cached_property
    def _children(self) -> dict[str, list[str]]:
        children: dict[str, list[str]] = {}
        for name in [*self._tensors, *self._objects]:
            at = name.find(".")
            while at != -1:
                children.setdefault(name[:at], []).append(name[at + 1 :])
                at = name.find(".", at + 1)
        return children
