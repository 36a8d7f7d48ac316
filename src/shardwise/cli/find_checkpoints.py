"""Find and open the checkpoints at a path. Errors describe the path if it has no checkpoint."""

from __future__ import annotations

import difflib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointNotFoundError, FormatError, StateError
from shardwise.manifest import validate
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import (
    MANIFEST,
    REMOVED,
    is_file_of_save,
    step_directory,
    step_of_directory,
)
from shardwise.manifest.pieces import Pieces
from shardwise.retention import Choice, choose_step
from shardwise.store import Store, open_store

if TYPE_CHECKING:
    from shardwise.engine.opened import Opened

THREADS = 16
"""The number of directories to list at the same time. Object stores get a request for each."""
MAX_EXAMINED = 64
"""The most files and directories to examine below a path, for an error message."""
TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
"""The usual suffixes of files that `torch.save` writes."""


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint.

    Attributes:
        foreign: the opened checkpoint if it is foreign; otherwise None.
    """

    store: Store
    manifest: Manifest
    foreign: Opened | None = None

    @property
    def bytes(self) -> int:
        """The size of all data files."""
        return sum(file.size for file in self.manifest.files)


@dataclass(frozen=True, slots=True)
class CheckpointDirectory:
    """The directory of a checkpoint or of an unfinished save.

    Attributes:
        name: name of the directory.
        files: names of the files in the directory; empty for a foreign checkpoint.
        foreign: the opened checkpoint if it is foreign; otherwise None.
    """

    name: str
    store: Store
    files: frozenset[str]
    foreign: Opened | None = None

    @property
    def committed(self) -> bool:
        """Whether the directory has a manifest, or holds a foreign checkpoint."""
        return MANIFEST in self.files or self.foreign is not None

    @property
    def removed(self) -> bool:
        """Whether the checkpoint was removed, and its files stay for processes that read them."""
        return not self.committed and REMOVED in self.files

    @property
    def step(self) -> int | None:
        """The step that the directory is named after."""
        return step_of_directory(self.name)


def open_checkpoint(
    path: str,
    format: str | None = None,  # noqa: A002 - as in `open`
    step: int | None = None,
) -> CommittedCheckpoint:
    """Open the checkpoint at a path. In a root, open the checkpoint of a step, or the newest one.

    Args:
        format: the format to read, if the path holds foreign checkpoints of several formats.
        step: the step, if the path is a root.

    Raises:
        CheckpointNotFoundError: the path has no checkpoint; the message describes what is there, or
            suggests a similar path.
        StateError: a step is given, but the path is not a root.
        FormatError: the manifest is damaged.
    """
    store = _store_of_step(open_store(path), step)
    foreign = _open_foreign(store, format)
    if foreign is not None:
        return CommittedCheckpoint(store, foreign.manifest, foreign)
    if MANIFEST not in _list_names(store):
        raise _error_for_root(store)
    return open_committed(store)


def open_committed(store: Store) -> CommittedCheckpoint:
    """Return the checkpoint in a store that has a manifest.

    Raises:
        FormatError: the manifest is damaged.
    """
    try:
        return CommittedCheckpoint(
            store, decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
        )
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error


def checked_pieces(checkpoint: CommittedCheckpoint) -> Pieces:
    """Check the manifest of a checkpoint, and return the pieces. Data files are not read.

    Raises:
        FormatError: the manifest is damaged.
    """
    if checkpoint.foreign is not None:
        return checkpoint.foreign.pieces
    return validate.validated_pieces_of(checkpoint.store, checkpoint.manifest)


def list_checkpoints_below(path: str) -> list[CheckpointDirectory]:
    """Return the checkpoints and unfinished saves below a root, ordered by step.

    Raises:
        CheckpointNotFoundError: the path is a checkpoint, or holds no checkpoints of shardwise.
    """
    store = open_store(path)
    if MANIFEST in _list_names(store):
        raise CheckpointNotFoundError(
            f"{store} is a checkpoint, not a directory of checkpoints: "
            f"run `shardwise inspect {store}`, or list the directory above"
        )
    directories = _list_directories(store)
    if not directories:
        raise _error_naming_foreign(store) or _error_without_checkpoints(store)
    return directories


def find_checkpoints(path: str) -> list[CheckpointDirectory]:
    """Return the checkpoint at a path. In a root, return all checkpoints and unfinished saves.

    Raises:
        CheckpointNotFoundError: the path is neither a checkpoint nor a root.
    """
    store = open_store(path)
    name = store.name
    try:
        names = _list_names(store)
        if MANIFEST in names:
            return [CheckpointDirectory(name, store, frozenset(names))]
        return list_checkpoints_below(path)
    except CheckpointNotFoundError:
        foreign = _open_foreign(store)
        if foreign is None:
            raise
        return [CheckpointDirectory(name, store, frozenset(), foreign)]


def _store_of_step(store: Store, step: int | None) -> Store:
    """Return the directory of a step if the store is a root; otherwise return the store.

    Raises:
        StateError: a step is given, but the store is not a root.
    """
    try:
        names = store.list()
    except NotADirectoryError:
        names = []
    if MANIFEST not in names and any(step_of_directory(name) is not None for name in names):
        choice: Choice = "newest" if step is None else step
        return store.at(step_directory(choose_step(store, choice)))
    if step is not None and names:
        raise StateError(
            f"--step {step}: {store} is not a directory of checkpoints, one for each step: leave "
            "out --step"
        )
    return store


def _open_foreign(store: Store, format: str | None = None) -> Opened | None:  # noqa: A002
    try:
        if MANIFEST in store.list():
            return None
    except NotADirectoryError:
        pass  # the store is one file
    from shardwise.formats.options import OpenOptions
    from shardwise.opening import open_foreign  # imports torch, which takes a second

    return open_foreign(store, OpenOptions(skip_unknown=True, format=format))


def _list_names(store: Store) -> list[str]:
    try:
        names = store.list()
    except NotADirectoryError:
        names = []
    if names or not store.is_file():
        return names
    if (parent := store.parent) is not None and parent.at(MANIFEST).is_file():
        raise CheckpointNotFoundError(
            f"{store} is a file, but a checkpoint is a directory: did you mean {parent}?"
        )
    raise _error_naming_foreign(store) or CheckpointNotFoundError(
        f"{store} is a file in no known format: pass the directory of a checkpoint or of a run"
    )


def _list_directories(root: Store) -> list[CheckpointDirectory]:
    def examine(name: str) -> CheckpointDirectory | None:
        is_step = step_of_directory(name) is not None
        try:
            store = root.at(name)
            files = frozenset(store.list())
        except NotADirectoryError:
            return None
        except OSError:
            if is_step:
                raise
            return None
        if is_step or MANIFEST in files or any(map(is_file_of_save, files)):
            return CheckpointDirectory(name, store, files)
        return None

    with ThreadPoolExecutor(THREADS, "shardwise-list") as pool:
        directories = [each for each in pool.map(examine, root.list()) if each is not None]
    return sorted(directories, key=lambda each: (-1 if each.step is None else each.step, each.name))


def _error_naming_foreign(store: Store) -> CheckpointNotFoundError | None:
    """Return an error that names the foreign checkpoints at or directly below a path.

    Return None if there are none.
    """
    if not store.exists():
        return None
    from shardwise.opening import foreign_formats  # imports torch, which takes a second

    formats = foreign_formats(store)
    if formats:
        return CheckpointNotFoundError(
            f"{store} is one checkpoint ({formats}), not a directory of shardwise checkpoints: "
            f"run `shardwise inspect {store}`"
        )
    formats_below: dict[str, str] = {}
    for name in [] if store.is_file() else store.list()[:MAX_EXAMINED]:
        below = store.at(name)
        is_other_file = not name.endswith(TORCH_SUFFIXES) and below.is_file()
        formats = "" if is_other_file else foreign_formats(below)
        if formats:
            formats_below[name] = formats
    if not formats_below:
        return None
    name, formats = next(reversed(formats_below.items()))
    return CheckpointNotFoundError(
        f"{store} holds no shardwise checkpoints, but {len(formats_below)} of other formats: "
        f"{', '.join(list(formats_below)[:3])}{', …' if len(formats_below) > 3 else ''}. To see "
        f"one, run `shardwise inspect {store.at(name)}` ({formats})"
    )


def _error_for_root(store: Store) -> CheckpointNotFoundError:
    """Return the error for a directory that is not a checkpoint, but may be a root."""
    committed = [each for each in _list_directories(store) if each.committed]
    if committed:
        return CheckpointNotFoundError(
            f"{store} is a directory of checkpoints, not a checkpoint: pass one of them; "
            f"the newest is {committed[-1].store}"
        )
    return _error_without_checkpoints(store)


def _error_without_checkpoints(store: Store) -> CheckpointNotFoundError:
    """Return the error for a path with neither a checkpoint nor a directory of checkpoints."""
    if any(map(is_file_of_save, store.list())):
        return CheckpointNotFoundError(
            f"{store} has no {MANIFEST}: its save is still running, or was interrupted. Wait "
            "until it ends, or pass another checkpoint"
        )
    if roots := _find_roots_below(store):
        return CheckpointNotFoundError(
            f"{store} is not the root of a run: did you mean {' or '.join(map(str, roots[:3]))}?"
        )
    if store.exists():
        return CheckpointNotFoundError(
            f"{store} is not a checkpoint, and holds no checkpoints: it has no {MANIFEST}, and its "
            "files are in no known format. Pass the directory of a checkpoint or of a run"
        )
    parent = store.parent
    if parent is None or not parent.exists():
        return CheckpointNotFoundError(
            f"{store} does not exist, nor does {parent}: check the path, and whether its file "
            "system is mounted on this machine"
        )
    similar = difflib.get_close_matches(store.name, parent.list(), n=3)
    hint = (
        f": did you mean {' or '.join(str(parent.at(name)) for name in similar)}?"
        if similar
        else ""
    )
    return CheckpointNotFoundError(f"{store} does not exist{hint}")


def _find_roots_below(store: Store) -> list[Store]:
    """Return the directories directly below a path that hold the checkpoints of a run."""

    def is_root(below: Store) -> bool:
        try:
            return any(step_of_directory(name) is not None for name in below.list())
        except OSError:  # a file, or a directory that may not be read
            return False

    return [each for each in map(store.at, store.list()[:MAX_EXAMINED]) if is_root(each)]
