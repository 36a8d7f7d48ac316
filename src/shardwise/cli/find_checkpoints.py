"""Find the checkpoints at a path, and explain what is there instead if there are none."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.manifest import validate
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST, made_by_save, step_directory, step_of_directory
from shardwise.manifest.table import Pieces
from shardwise.retention import Choice, choose_step
from shardwise.store import LocalStore, Store, local_path, open_store

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened

MOST_EXAMINED = 64
"""Directories below a path whose formats are detected for an error message."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint: its store and manifest; `foreign` if it has another format."""

    store: Store
    manifest: Manifest
    foreign: Opened | None = None

    @property
    def bytes(self) -> int:
        """The size of all data files."""
        return sum(file.size for file in self.manifest.files)


@dataclass(frozen=True, slots=True)
class Entry:
    """A directory of a checkpoint or of an unfinished save; `foreign` if it has another format."""

    name: str
    store: Store
    files: frozenset[str]
    foreign: Opened | None = None

    @property
    def committed(self) -> bool:
        """Whether the directory has a manifest, or holds a foreign checkpoint."""
        return MANIFEST in self.files or self.foreign is not None

    @property
    def step(self) -> int | None:
        """The step that the directory is named after."""
        return step_of_directory(self.name)


def checkpoint_at(
    path: str,
    format: str | None = None,  # noqa: A002 - as in `open`
    step: int | None = None,
) -> Saved:
    """Open the checkpoint at a path; for the root of a run, its newest one or that of a step.

    Args:
        format: the format to read, if the path holds foreign checkpoints of several.

    Raises:
        CheckpointNotFoundError: there is none; the message says what is there, or a similar path.
        StateError: a step is given, but the path is not the root of a run.
        FormatError: the manifest is damaged.
    """
    store = _chosen(open_store(path), step)
    foreign = _foreign_at(store, format)
    if foreign is not None:
        return Saved(store, foreign.manifest, foreign)
    if MANIFEST not in _names(store):
        raise _no_checkpoint(store)
    return read_manifest(store)


def read_manifest(store: Store) -> Saved:
    """Return the checkpoint in a store that has a manifest.

    Raises:
        FormatError: the manifest is damaged.
    """
    try:
        return Saved(store, decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST)))
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error


def trusted_pieces(saved: Saved) -> Pieces:
    """Return the pieces of a checkpoint, after all checks that do not read its data files.

    Raises:
        FormatError: the manifest is damaged.
    """
    if saved.foreign is not None:
        return saved.foreign.pieces
    return validate.trusted_pieces(saved.store, saved.manifest)


def checkpoints_below(path: str) -> list[Entry]:
    """Return the checkpoints and unfinished saves in a directory, ordered by step.

    Raises:
        CheckpointNotFoundError: the path is a checkpoint itself, or holds none of ours.
    """
    store = open_store(path)
    if MANIFEST in _names(store):
        raise CheckpointNotFoundError(
            f"{store} is a checkpoint, not a directory of checkpoints: "
            f"run `shardwise inspect {store}`, or list the directory above it"
        )
    found = _below(store)
    if not found:
        raise _foreign_instead(store) or _nothing(store)
    return found


def checkpoints_at(path: str) -> list[Entry]:
    """Return the checkpoint at a path, or all checkpoints in it if it is a directory of them.

    Raises:
        CheckpointNotFoundError: it is neither.
    """
    store = open_store(path)
    name = Path(str(store)).name
    try:
        names = _names(store)
        if MANIFEST in names:
            return [Entry(name, store, frozenset(names))]
        return checkpoints_below(path)
    except CheckpointNotFoundError:
        foreign = _foreign_at(store)
        if foreign is None:
            raise
        return [Entry(name, store, frozenset(), foreign)]


def _chosen(store: Store, step: int | None) -> Store:
    """Return the directory of a step if the store is the root of a run, else the store itself."""
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
    path = local_path(store)
    if path is None or (path / MANIFEST).exists():
        return None
    from shardwise.opening import OpenOptions, open_foreign  # imports torch, which takes a second

    return open_foreign(store, OpenOptions(skip_unknown=True, format=format))


def _names(store: Store) -> list[str]:
    try:
        return store.list()
    except NotADirectoryError:
        pass
    raise _foreign_instead(store) or CheckpointNotFoundError(
        f"{store} is a file; a checkpoint is a directory: did you mean {Path(str(store)).parent}?"
    )


def _below(root: Store) -> list[Entry]:
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
            found.append(Entry(name, store, files))
    return sorted(found, key=lambda each: (-1 if each.step is None else each.step, each.name))


def _foreign_instead(store: Store) -> CheckpointNotFoundError | None:
    """Return an error that names the foreign checkpoints at a path or directly below it."""
    path = local_path(store)
    if path is None or not path.exists():
        return None
    from shardwise.opening import foreign_formats  # imports torch, which takes a second

    formats = foreign_formats(store)
    if formats:
        return CheckpointNotFoundError(
            f"{store} is one checkpoint ({formats}), not a directory of shardwise checkpoints: "
            f"run `shardwise inspect {store}`"
        )
    below: dict[str, str] = {}
    for child in sorted(path.iterdir())[:MOST_EXAMINED] if path.is_dir() else ():
        formats = foreign_formats(LocalStore(child)) if child.is_dir() else ""
        if formats:
            below[child.name] = formats
    if not below:
        return None
    name, formats = next(reversed(below.items()))
    return CheckpointNotFoundError(
        f"{store} holds no shardwise checkpoints, but {len(below)} of other formats: "
        f"{', '.join(list(below)[:3])}{', …' if len(below) > 3 else ''}. To look at one, run "
        f"`shardwise inspect {path / name}` ({formats})"
    )


def _no_checkpoint(store: Store) -> CheckpointNotFoundError:
    """Return the error for a directory that is not a checkpoint."""
    committed = [each for each in _below(store) if each.committed]
    if committed:
        return CheckpointNotFoundError(
            f"{store} is a directory of checkpoints, not a checkpoint: name one of them; "
            f"the newest is {committed[-1].store}"
        )
    return _nothing(store)


def _nothing(store: Store) -> CheckpointNotFoundError:
    """Return the error for a path with neither a checkpoint nor a directory of checkpoints."""
    if any(map(made_by_save, store.list())):
        return CheckpointNotFoundError(
            f"{store} has no {MANIFEST}: its save is still running, or was interrupted"
        )
    path = local_path(store)
    if path is None or path.is_dir():
        return CheckpointNotFoundError(
            f"{store} is not a checkpoint, and holds none: there is no {MANIFEST}, and the files "
            "are in no known format"
        )
    above = path.parent
    if not above.is_dir():
        return CheckpointNotFoundError(f"{store} does not exist, nor does {above}")
    near = difflib.get_close_matches(path.name, LocalStore(above).list(), n=3)
    hint = f": did you mean {' or '.join(str(above / name) for name in near)}?" if near else ""
    return CheckpointNotFoundError(f"{store} does not exist{hint}")
