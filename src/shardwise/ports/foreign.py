"""Checkpoints that shardwise has not written: what the kernel asks the part that knows formats.

Each function imports this part (`shardwise.parts.formats`) when it is called. Readers of other
packages join by the port of readers (docs/ports/reader.md), without the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

from shardwise.kernel.manifest.checksums import FileChecksums
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.store import Files, Store

_load = partial(load_built_in, "shardwise.foreign")


class Specification(Protocol):
    """How to assemble tensors; `shardwise.spec` makes one."""

    @property
    def files(self) -> object:
        """The names of the files that the specification reads; None if a reader finds them."""

    def apply(self, path: str, layout: Layout) -> Layout:
        """Return the layout with the tensors that the specification describes.

        Raises:
            MismatchError: the specification does not fit the checkpoint.
        """


def is_specification(value: object) -> bool:
    """Return whether a value is what `shardwise.spec` makes."""
    return isinstance(value, _load("specification"))


def formats_at(store: Store) -> str:
    """Return the names of the foreign formats at a place; "" if there is none."""
    return cast(str, _load("formats_at")(store))


def find_directory(store: Store, names: Sequence[str], step: object) -> str:
    """Return the directory of a step, or of its tensors, in a place of another library, or "".

    Raises:
        FormatError: the directory of the step is missing.
    """
    return cast(str, _load("find_directory")(store, names, step))


def step_in_path(place: Store) -> int | None:
    """Return the training step in the path of a checkpoint; None if it has none, or several."""
    return cast("int | None", _load("step_in_path")(place))


def read_layout(
    store: Store,
    *,
    spec: Specification | None,
    skip_unknown: bool,
    format: str | None,  # noqa: A002 - the usual name
) -> Layout:
    """Return the layout of a foreign checkpoint. `check_layout` checks it.

    Raises:
        CheckpointNotFoundError: no known format is recognised.
        FormatError: the checkpoint is malformed.
        MismatchError: the specification does not fit the checkpoint.
    """
    options: dict[str, Any] = {"spec": spec, "skip_unknown": skip_unknown, "format": format}
    return cast(Layout, _load("read_layout")(store, **options))


def check_layout(store: Store, layout: Layout | bytes) -> tuple[Files, Layout]:
    """Check the layout of a foreign checkpoint, and return it with the files.

    Args:
        store: the place of the checkpoint.
        layout: the layout, which another rank may have encoded.

    Raises:
        FormatError: the layout is inconsistent.
    """
    return cast("tuple[Files, Layout]", _load("check_layout")(store, layout))


def checksums_of(files: Files, layout: Layout) -> Iterable[FileChecksums]:
    """Return the checksums in the files of a foreign checkpoint: the CRC-32s of zip archives.

    Raises:
        FormatError: an archive is malformed or truncated.
    """
    return cast("Iterable[FileChecksums]", _load("checksums_of")(files, layout))
