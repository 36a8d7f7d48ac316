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
    """A function from a target's name to the checkpoint's.

    A mapping renames the names that are its keys, and all names below them; the longest key
    counts.

    Raises:
        StateError: it is neither a function nor a mapping of names.
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return _named_on_failure(rename)
    if not isinstance(rename, Mapping) or not all(
        isinstance(each, str) for pair in rename.items() for each in pair
    ):
        raise StateError(f"rename={rename!r}: a function or a mapping of names is needed")
    pairs = sorted(rename.items(), key=lambda pair: -len(pair[0]))

    def by_prefix(name: str) -> str:
        for target, saved in pairs:
            if name == target or name.startswith(target + "."):
                return saved + name[len(target) :]
        return name

    return by_prefix


def _named_on_failure(rename: Callable[[str], str]) -> Callable[[str], str]:
    """The caller's function; what it raises, or gives that is no name, says of which name."""

    def renamed(name: str) -> str:
        try:
            found = rename(name)
        except Exception as error:
            add_note(error, f"{name}: raised by rename=, which was given this name")
            raise
        if not isinstance(found, str):
            raise StateError(f"{name}: rename= gave {found!r}; a name (str) is needed")
        return found

    return renamed


class SavedState:
    """What a checkpoint holds, asked for by the names of the target.

    Args:
        absent: files that it lacks, by the name that what is in them would have.
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
        """The entry of a tensor, if there is one."""
        index = self._tensors.get(self.saved_name(name))
        return None if index is None else self.manifest.tensors[index]

    def stored_index(self, name: str) -> int:
        """Number of the tensor that holds the bytes: its own, or what it is tied to."""
        entry = self.manifest.tensors[self._tensors[self.saved_name(name)]]
        return self._tensors[entry.same_as or entry.name]

    def has_object(self, name: str) -> bool:
        """Whether there is a shared plain value of this name."""
        return self.saved_name(name) in self._objects

    def object(self, name: str) -> object:
        """The encoded value of this name, which is there."""
        return self._objects[self.saved_name(name)]

    def has_per_rank(self, name: str) -> bool:
        """Whether each rank has a value of this name."""
        return self.saved_name(name) in self.manifest.per_rank

    def kind(self, name: str) -> str | None:
        """What has this name, in words; None if nothing has."""
        if self.tensor(name) is not None:
            return "a tensor"
        if self.has_object(name):
            return "a plain value"
        return "a value of each rank" if self.has_per_rank(name) else None

    def below(self, name: str) -> list[str]:
        """The rest, after `name` and a dot, of the names of all tensors and objects below it."""
        return self._children.get(self.saved_name(name), [])

    def near(self, name: str) -> list[str]:
        """Names in the checkpoint, and keys that names begin with, that are spelled much alike."""
        names = [*self.all_names()]
        known = [each for each in names if abs(len(each) - len(name)) <= 3][:MOST_COMPARED]
        keys = [each.partition(".")[0] for each in names]
        return difflib.get_close_matches(name, [*dict.fromkeys([*known, *keys])])

    def all_names(self) -> Iterable[str]:
        """The names in the checkpoint, as they stand there."""
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
