"""What is written of a checkpoint, and as what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwise.convert.output import Part
from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.manifest.manifest import Manifest, TensorEntry

MOST_TOPS = 8


@dataclass(frozen=True, slots=True)
class Written:
    """A tensor: its name in the target, its entry in the source, and the dtype it is written in."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def part(self) -> Part:
        """All of it; of one that is tied to another, all of that."""
        return Part(self.entry.same_as or self.entry.name, Box.whole(self.entry.shape), self.dtype)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is written.

    Attributes:
        source: what tensors are read from, and what steps and plain values are taken from.
        tensors: in the order of the source. What is tied to another is tied to one of these.
        save_id: for the names of files: the same if the same is converted in the same way.
        root: formats that hold a model alone have the tensors below this name, without it.
        max_file: bytes of tensors in a file, at most.
        config: the model's configuration, for formats that have it beside.
    """

    source: Manifest
    tensors: tuple[Written, ...]
    save_id: str
    root: str
    max_file: int
    config: bytes | None

    def model(self) -> list[Written]:
        """The tensors below the root, without its name; all, if it is empty.

        Raises:
            StateError: there are none.
        """
        if not self.root:
            return list(self.tensors)
        start = f"{self.root}."
        found = [
            Written(each.name.removeprefix(start), each.entry, each.dtype)
            for each in self.tensors
            if each.name.startswith(start)
        ]
        if not found:
            raise StateError(nothing_below(self.root, [each.name for each in self.tensors]))
        return found

    def beside(self) -> tuple[str, ...]:
        """What a format that holds a model alone leaves out: one line for tensors, one for values.

        The names of all are too many; what they begin with says whether the model is among them.
        """
        start = f"{self.root}." if self.root else ""
        tensors = [each.name for each in self.tensors if not each.name.startswith(start)]
        values = [each.name for each in self.source.objects] + [*self.source.per_rank]
        said = []
        if tensors:
            said.append(
                f"{len(tensors)} tensor(s) below {_tops(tensors)}: this format holds only the "
                f"model, which is below {self.root!r}"
            )
        if values:
            said.append(
                f"{len(values)} plain value(s), of {_tops(values)}: this format holds only tensors"
            )
        return tuple(said)


def _tops(names: Iterable[str]) -> str:
    """What names begin with."""
    tops = [*dict.fromkeys(name.split(".")[0][:60] for name in names)]
    return ", ".join(tops[:MOST_TOPS]) + (", …" if len(tops) > MOST_TOPS else "")


def nothing_below(root: str, names: Iterable[str]) -> str:
    """What is wrong where none of the names is below the root."""
    return (
        f"the checkpoint has no tensor below {root!r}: set root= (on the command line --root) to "
        f'the key of the model, one of {_tops(names)}; or "" to write all'
    )
