"""What lies at a path: a checkpoint, a root of checkpoints, or neither; and what was meant."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST, made_by_save, step_directory, step_of_directory
from shardwise.manifest.table import Pieces
from shardwise.manifest.validate import trusted_pieces as stored_pieces
from shardwise.retention import Choice, choose_step
from shardwise.store import LocalStore, Store, open_store

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened

MOST_BELOW = 64
"""Directories below a place that are looked at for what formats they are of."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint: where it is, and its manifest; `foreign`, if it is not ours."""

    store: Store
    manifest: Manifest
    foreign: Opened | None = None

    @property
    def bytes(self) -> int:
        """Of all its data files."""
        return sum(file.size for file in self.manifest.files)


@dataclass(frozen=True, slots=True)
class Below:
    """A directory that holds a checkpoint, or what is left of one; `foreign`, if it is not ours."""

    name: str
    store: Store
    files: frozenset[str]
    foreign: Opened | None = None

    @property
    def committed(self) -> bool:
        """Whether there is a manifest, or a foreign checkpoint."""
        return MANIFEST in self.files or self.foreign is not None

    @property
    def step(self) -> int | None:
        """The step that the directory is named after, if it is."""
        return step_of_directory(self.name)

    @property
    def order(self) -> tuple[int, str]:
        """Steps ascending, other names before them."""
        return (-1 if self.step is None else self.step, self.name)


def checkpoint_at(
    path: str,
    format: str | None = None,  # noqa: A002 - as in `open`
    step: int | None = None,
) -> Saved:
    """The checkpoint at a path; of the root of a run the newest, or that of a step.

    Args:
        format: which to read where foreign ones of several lie there.

    Raises:
        CheckpointNotFoundError: there is none; says what there is, and what may have been meant.
        StateError: a step is given, and the path is no root.
        FormatError: its manifest cannot be trusted.
    """
    store = _chosen(open_store(path), step)
    foreign = _foreign_at(store, format)
    if foreign is not None:
        return Saved(store, foreign.manifest, foreign)
    if MANIFEST not in _names(store):
        raise _no_checkpoint(store)
    return read_manifest(store)


def _chosen(store: Store, step: int | None) -> Store:
    """What `sw.open` opens: a step's directory below a root, else the place itself."""
    try:
        names = store.list()
    except NotADirectoryError:
        names = []
    if MANIFEST not in names and any(step_of_directory(name) is not None for name in names):
        choice: Choice = "newest" if step is None else step
        return store.at(step_directory(choose_step(store, choice)))
    if step is not None and names:
        raise StateError(
            f"--step {step}: {store} is not a directory of checkpoints, with one for each step; "
            "leave out --step"
        )
    return store


def _foreign_at(store: Store, format: str | None = None) -> Opened | None:  # noqa: A002
    if not isinstance(store, LocalStore) or (store.path / MANIFEST).exists():
        return None
    # Torch takes a second: only those wait who need it.
    from shardwise.opening import Reading, open_foreign

    return open_foreign(store, Reading(skip_unknown=True, format=format))


def read_manifest(store: Store) -> Saved:
    """The checkpoint in a store that holds one.

    Raises:
        FormatError: its manifest cannot be trusted.
    """
    try:
        return Saved(store, decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST)))
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error


def trusted_pieces(saved: Saved) -> Pieces:
    """The pieces of a checkpoint, once all is checked that can be without its files.

    Raises:
        FormatError: its manifest cannot be trusted.
    """
    if saved.foreign is not None:
        return saved.foreign.pieces
    return stored_pieces(saved.store, saved.manifest)


def checkpoints_below(path: str) -> list[Below]:
    """The directories below a root, by step.

    Raises:
        CheckpointNotFoundError: the path is a checkpoint itself, or there are none of ours below
            it; says what is there instead.
    """
    store = open_store(path)
    if MANIFEST in _names(store):
        raise CheckpointNotFoundError(
            f"{store} is a checkpoint, not a directory of checkpoints: "
            f"see `shardwise inspect {store}`, or list the directory above it"
        )
    found = _below(store)
    if not found:
        raise _foreign_instead(store) or _nothing(store)
    return found


def checkpoints_at(path: str) -> list[Below]:
    """The checkpoint at a path, or all directories below it if it is a root.

    Raises:
        CheckpointNotFoundError: it is neither.
    """
    store = open_store(path)
    try:
        names = _names(store)
        if MANIFEST in names:
            return [Below(Path(str(store)).name, store, frozenset(names))]
        return checkpoints_below(path)
    except CheckpointNotFoundError:
        foreign = _foreign_at(store)
        if foreign is None:
            raise
        return [Below(Path(str(store)).name, store, frozenset(), foreign)]


def _names(store: Store) -> list[str]:
    try:
        return store.list()
    except NotADirectoryError:
        pass
    raise _foreign_instead(store) or CheckpointNotFoundError(
        f"{store} is a file; a checkpoint is a directory: did you mean {Path(str(store)).parent}?"
    )


def _below(root: Store) -> list[Below]:
    found = []
    for name in root.list():
        is_step = step_of_directory(name) is not None
        try:
            store = root.at(name)
            files = frozenset(store.list())
        except NotADirectoryError:
            continue
        except OSError:
            if is_step:
                raise
            continue
        if is_step or MANIFEST in files or any(map(made_by_save, files)):
            found.append(Below(name, store, files))
    return sorted(found, key=lambda each: each.order)


def _foreign_instead(store: Store) -> CheckpointNotFoundError | None:
    """Say of which other formats a place is, or the directories below it."""
    if not isinstance(store, LocalStore) or not store.path.exists():
        return None
    from shardwise.opening import foreign_formats  # torch takes a second: only here

    formats = foreign_formats(store)
    if formats:
        return CheckpointNotFoundError(
            f"{store} is one checkpoint ({formats}), not a directory of shardwise's checkpoints: "
            f"see `shardwise inspect {store}`"
        )
    below: dict[str, str] = {}
    for path in sorted(store.path.iterdir())[:MOST_BELOW] if store.path.is_dir() else ():
        formats = foreign_formats(LocalStore(path)) if path.is_dir() else ""
        if formats:
            below[path.name] = formats
    if not below:
        return None
    name, formats = next(reversed(below.items()))
    return CheckpointNotFoundError(
        f"{store} has no checkpoints of shardwise below it, but {len(below)} of other formats: "
        f"{', '.join(list(below)[:3])}{', …' if len(below) > 3 else ''}. Look at one with "
        f"`shardwise inspect {store.path / name}` ({formats})"
    )


def _no_checkpoint(store: Store) -> CheckpointNotFoundError:
    """Say what there is at a place where a checkpoint was expected."""
    committed = [each for each in _below(store) if each.committed]
    if committed:
        return CheckpointNotFoundError(
            f"{store} is a directory of checkpoints, not a checkpoint: name one of them; "
            f"the newest is {committed[-1].store}"
        )
    return _nothing(store)


def _nothing(store: Store) -> CheckpointNotFoundError:
    """Say what there is at a place where there is neither a checkpoint nor a root."""
    if any(map(made_by_save, store.list())):
        return CheckpointNotFoundError(
            f"{store} has no {MANIFEST}: its save still runs, or was cut off"
        )
    if not isinstance(store, LocalStore) or store.path.is_dir():
        return CheckpointNotFoundError(
            f"{store} is not a checkpoint, and has none below it: there is no {MANIFEST}, and the "
            "files are of no other format that is known"
        )
    above = store.path.parent
    if not above.is_dir():
        return CheckpointNotFoundError(f"{store} does not exist, nor does {above}")
    near = difflib.get_close_matches(store.path.name, LocalStore(above).list(), n=3)
    hint = f": did you mean {' or '.join(str(above / name) for name in near)}?" if near else ""
    return CheckpointNotFoundError(f"{store} does not exist{hint}")
