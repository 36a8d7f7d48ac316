"""List the checkpoints of a run, and remove them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from shardwise.kernel.engine.checkpoint_directory import (
    CheckpointDirectory,
    State,
    map_in_threads,
)
from shardwise.kernel.errors import CheckpointNotFoundError, FormatError, StoreError
from shardwise.kernel.manifest.manifest import step_of_directory
from shardwise.kernel.manifest.pieces import count_tensors
from shardwise.kernel.store import Store, open_store
from shardwise.parts.tiers.record import MirrorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCheckpoint:
    """A directory below a root. If its manifest is missing or damaged, many fields are None.

    Attributes:
        path: the path or URL of the directory.
        directory: the name of the directory.
        step: the training step, if the checkpoint has one.
        state: `"committed"`: the save finished, and all files have the right sizes. `"damaged"`:
            the manifest cannot be read, or a file is missing or has another size. `"unfinished"`:
            the save is running, or was interrupted. `"removed"`: the checkpoint is being removed,
            or was removed from a store without locks, and its files stay for processes that read
            them.
        problem: a description of the damage; None unless the checkpoint is damaged.
        saved_at: the time of the save: ISO 8601, in UTC.
        tensors: the number of tensors.
        bytes: the size of all data files.
        files: the number of data files.
        world_size: the number of ranks that saved.
        metrics: the metrics that were saved with the checkpoint.
        mirrored: whether the mirror of the root has this checkpoint; None if there is no mirror.
    """

    path: str
    directory: str
    step: int | None
    state: State
    problem: str | None = None
    saved_at: str | None = None
    tensors: int | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    metrics: dict[str, float | None] | None = None
    mirrored: bool | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """The checkpoints below a root.

    Attributes:
        root: the path or URL of the root.
        checkpoints: the checkpoints and unfinished saves, by ascending step.
        mirror: what the mirror has, what it waits for, and why it fails; None if the root has no
            mirror.
    """

    root: str
    checkpoints: list[ListedCheckpoint]
    mirror: MirrorRecord | None = None


def list_checkpoints(root: str | os.PathLike[str] | Store) -> Listing:
    """List the checkpoints below a root. Only the sizes of data files are compared.

    Example:

        for each in sw.list_checkpoints("runs/a").checkpoints:
            print(each.step, each.state, each.metrics)

    Raises:
        CheckpointNotFoundError: the path is a checkpoint, or holds no checkpoints of shardwise. The
            message says what is there.
    """
    store = open_store(root)
    directory = CheckpointDirectory(store)
    names = directory.names()
    if directory.state(names) == "committed":
        raise CheckpointNotFoundError(
            f"{store} is a checkpoint, not a directory of checkpoints: open it with sw.open or "
            "`shardwise inspect`; to list or remove checkpoints, pass the root above it, as in "
            "`shardwise rm ROOT --step N`"
        )
    mirror = None
    with suppress(OSError):  # list the checkpoints even if the record is unreadable
        mirror = MirrorRecord.read(store)
    found = map_in_threads(partial(_examine, store, mirror), names)
    checkpoints = [each for each in found if each is not None]
    if not checkpoints:
        from shardwise.kernel.opening import (
            raise_for_missing_root,  # imports torch, which takes a second
        )

        raise_for_missing_root(store)
    checkpoints.sort(key=lambda each: (-1 if each.step is None else each.step, each.directory))
    return Listing(str(root), checkpoints, mirror)


def remove(place: str | os.PathLike[str] | Store) -> list[str]:
    """Remove a checkpoint, or the files of an unfinished save. Files of other programs stay.

    In a store without locks, such as an object store, the checkpoint is removed at once, but its
    files stay for processes that read them. A later save of the run, or a second call after the
    store's `reading_grace`, deletes these files.

    Returns:
        The names of the files that stay; nothing if the directory is gone, or did not exist.

    Raises:
        StoreError: the checkpoint is being read or saved, or the directory has only files of other
            programs. Nothing was removed.
        NotADirectoryError: the place is a file.
    """
    store = open_store(place)
    directory, names = CheckpointDirectory(store), store.list()
    state = directory.state(names)
    if state == "committed":
        if not directory.remove():
            raise StoreError(f"{store} was not removed: another process reads it. Try again later")
    elif names and not directory.remove_leftovers() and state != "removed":
        raise StoreError(
            f"{store} was not removed: a save is writing to it, or its files are not from "
            "shardwise. Wait for the save, or remove the directory by hand"
        )
    elif not names:
        store.delete("")
    return store.list()


def _examine(root: Store, mirror: MirrorRecord | None, name: str) -> ListedCheckpoint | None:
    """Read the manifest in a directory of a root, and compare the sizes of its files.

    Return None if the directory is neither a checkpoint nor named after a step.
    """
    step = step_of_directory(name)
    try:
        store = root.at(name)
        names = store.list()
    except NotADirectoryError:
        return None
    except OSError:
        if step is not None:
            raise
        return None
    directory = CheckpointDirectory(store)
    state, manifest, problem = directory.examine(names, compares_sizes=True)
    tensors = None
    try:
        tensors = None if manifest is None else count_tensors(manifest.tensors)
    except FormatError as error:
        state, manifest, problem = "damaged", None, f"{store}: {error}"
    if state is None and step is None:
        return None
    describe = partial(
        ListedCheckpoint,
        path=str(store),
        directory=name,
        step=step,
        state=state or "unfinished",
        problem=problem or None,
    )
    if manifest is None:
        return describe()
    return describe(
        step=manifest.step if step is None else step,
        saved_at=manifest.created,
        tensors=tensors,
        bytes=sum(file.size for file in manifest.files),
        files=len(manifest.files),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
        mirrored=None if mirror is None else mirror.has(step or 0, manifest.save_id),
    )
