"""What lies at a place, opened: a checkpoint of ours, or a foreign one under a manifest."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.opened import (
    Opened,
    Replicas,
    open_checkpoint,
    opened_manifest,
    read_manifest,
)
from shardwise.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    MismatchError,
    StateError,
)
from shardwise.formats.checksums import sums_of
from shardwise.formats.detect import read_foreign, recognised
from shardwise.formats.foreign import Foreign
from shardwise.formats.index import MAGIC, decode_index, encode_index, read_indexed
from shardwise.formats.remap import remap
from shardwise.formats.specification import Specification
from shardwise.formats.tree import ForeignFiles, Tree
from shardwise.formats.validate import checked
from shardwise.manifest.manifest import FileEntry, Manifest
from shardwise.manifest.names import MANIFEST, made_by_save, step_directory, step_of_directory
from shardwise.retention import Choice, checked_choice, choose_step
from shardwise.store import LocalStore, Store


@dataclass(frozen=True, slots=True)
class Reading:
    """How a checkpoint is read.

    Attributes:
        spec: what its tensors mean, if that is not what they are called.
        index: the file that keeps what was found of a foreign one.
        skip_unknown: leave out values in pickles that are of unknown classes, instead of refusing.
        format: the key of the foreign format, where a place is of several.
    """

    spec: Specification | None = None
    index: str | os.PathLike[str] | None = None
    skip_unknown: bool = False
    format: str | None = None

    def __post_init__(self) -> None:
        if self.spec is not None and not isinstance(self.spec, Specification):
            raise StateError(f"spec={self.spec!r}: a specification is needed, as sw.spec makes it")

    def described(self, path: Path) -> bytes:
        """What is at a place that is no checkpoint of ours, encoded as an index.

        Raises:
            CheckpointNotFoundError: no format is recognised.
            FormatError: it is malformed.
            MismatchError: the specification does not fit.
        """
        tree = Tree(path, opaque=self.skip_unknown)
        by_ranks = self.spec is not None and self.spec.files is not None
        known = partial(read_foreign, format=self.format)
        read = self.spec.read if self.spec is not None and by_ranks else known
        if self.index is None:
            return encode_index(read(tree))
        terms = f"{self.spec if by_ranks else None}, {self.skip_unknown}, {self.format}"
        return read_indexed(tree, self.index, read, terms)

    def specified(self, opened: Opened) -> Opened:
        """A checkpoint of global tensors, as the specification has it."""
        if self.spec is None or self.spec.files is not None:
            return opened
        return remap(opened, self.spec.rules, self.spec.sizes)


PLAIN = Reading()
log = logging.getLogger("shardwise")


def open_any(
    enter: Callable[[], Store], group: Group, terms: str = "", reading: Reading = PLAIN
) -> Opened:
    """Open what is at a place, on all ranks together.

    Args:
        enter: gives the store; a failure of it is a failure on all ranks.
        terms: what else must be the same on all ranks.

    Raises:
        CheckpointNotFoundError: there is none.
        FormatError: it cannot be trusted, or is of no format that is known here.
        MismatchError: ranks open different places, or on different terms; or the specification
            does not fit.
    """
    read = partial(_read, reading=reading)
    opened = open_checkpoint(enter, group, terms, read=read, decode=_decode)
    for name, file in opened.absent.items() if group.rank == 0 else ():
        log.warning("%s: %s is missing, so that there is no %s", opened.store, file, name)
    return reading.specified(opened)


def place_below(enter: Callable[[], Store], choice: Choice, group: Group) -> str:
    """Which directory below a place to read, on all ranks together; "" for the place itself.

    A checkpoint is read itself. Below the root of a run, the chosen step's directory is read.

    Args:
        enter: gives the place; a failure of it is a failure on all ranks.

    Raises:
        CheckpointNotFoundError: the root has no such checkpoint.
        MismatchError: ranks choose differently.
        StateError: a step is chosen, and the place is a checkpoint itself.
    """
    entered: list[Store] = []

    def speak() -> bytes:
        entered.append(enter())
        return f"{entered[0]}, step={checked_choice(choice)!r}".encode()

    def answer(said: list[bytes]) -> bytes:
        if len(set(said)) > 1:
            asked = [f"rank {rank}: {each.decode()}" for rank, each in enumerate(said)]
            raise MismatchError("ranks do not open the same checkpoint:", asked)
        return _place_below(entered[0], checked_choice(choice)).encode()

    return exchange(group, "choosing a checkpoint", speak, answer).decode()


def _place_below(store: Store, choice: Choice) -> str:
    try:
        names = store.list()
    except NotADirectoryError:
        names = []
    if MANIFEST not in names and any(step_of_directory(name) is not None for name in names):
        return step_directory(choose_step(store, choice))
    if choice != "newest" and names:
        raise StateError(
            f"step={choice!r}: {store} is not the root of a run, which holds a directory for each "
            "step; leave out step= to read a checkpoint"
        )
    return ""


def open_foreign(store: Store, reading: Reading = PLAIN) -> Opened | None:
    """What is at a place, if it is a foreign checkpoint; by this process alone.

    Raises:
        FormatError: it is one, and malformed.
    """
    if not isinstance(store, LocalStore) or not store.path.exists() or _is_ours(store):
        return None
    try:
        return opened_foreign(Tree(store.path), decode_index(reading.described(store.path)))
    except CheckpointNotFoundError:
        return None


def foreign_formats(store: Store) -> str:
    """What foreign formats a place is of, in words; "" if it is of none, or ours all the same."""
    if not isinstance(store, LocalStore) or not store.path.exists() or _is_ours(store):
        return ""
    try:
        return " and ".join(reader.name for reader in recognised(Tree(store.path)))
    except (FormatError, OSError):  # who reads it is told; here it is in nobody's way
        return ""


def refuse_foreign(store: Store) -> None:
    """Refuse to save where a foreign checkpoint is.

    Raises:
        CheckpointExistsError: there is one.
    """
    if formats := foreign_formats(store):
        raise CheckpointExistsError(
            f"{store} holds a checkpoint of {formats}, which a save does not replace: save into a "
            "directory of its own"
        )


def refuse_file(store: Store) -> None:
    """Refuse to save where a file is.

    Raises:
        StateError: there is one.
    """
    if isinstance(store, LocalStore) and store.path.exists() and not store.path.is_dir():
        raise StateError(f"{store} is a file: expected a directory, which need not exist")


def refuse_as_root(store: Store) -> None:
    """Refuse a place that is a checkpoint as the root of a run's checkpoints.

    Raises:
        CheckpointExistsError: it is one, ours or a foreign one.
    """
    ours = MANIFEST in store.list()
    formats = "shardwise" if ours else foreign_formats(store)
    if formats:
        raise CheckpointExistsError(
            f"{store} is a checkpoint itself, of {formats}, and not the root of a run: give the "
            f"run a directory of its own, and start_from={str(store)!r} to begin from this"
        )


def _read(store: Store, reading: Reading) -> bytes:
    if isinstance(store, LocalStore) and store.path.name == MANIFEST and store.path.is_file():
        raise CheckpointNotFoundError(
            f"{store} is a file of a checkpoint: give its directory, {store.path.parent}"
        )
    try:
        return read_manifest(store)
    except CheckpointNotFoundError:
        if not isinstance(store, LocalStore) or not store.path.exists() or _is_ours(store):
            raise
    return reading.described(store.path)


def _is_ours(store: LocalStore) -> bool:
    """Whether this is a directory of ours all the same: of steps, unfinished, or empty."""
    if not store.path.is_dir():
        return False
    names = store.list()
    return not names or any(
        made_by_save(name) or step_of_directory(name) is not None for name in names
    )


def _decode(store: Store, data: bytes) -> Opened:
    if not data.startswith(MAGIC) or not isinstance(store, LocalStore):
        return opened_manifest(store, data)
    return opened_foreign(Tree(store.path), decode_index(data))


def opened_foreign(tree: Tree, foreign: Foreign) -> Opened:
    """A foreign checkpoint, once all is checked that can be without its bytes.

    Raises:
        FormatError: what is laid over its files does not hold together.
    """
    try:
        foreign = checked(foreign)
    except FormatError as error:
        raise FormatError(f"{tree}: {error}") from error
    hidden = {name for names in foreign.averages.values() for name in names}
    shown = [tensor for tensor in foreign.tensors if tensor.name not in hidden]
    number = {tensor.name: i for i, tensor in enumerate(shown)}
    parts: dict[int, tuple[int, ...]] = {}
    for name, versions in foreign.averages.items():
        number |= {each: len(number) + k for k, each in enumerate(versions)}
        parts[number[name]] = tuple(number[each] for each in versions)
    renumber = np.array([number[tensor.name] for tensor in foreign.tensors], np.int64)
    pieces = foreign.table.pieces
    copies = foreign.replicas.pieces
    moved = replace(pieces, tensor=renumber[pieces.tensor])
    copies = replace(copies, tensor=renumber[copies.tensor])
    replicas = Replicas(copies, foreign.replicas.stride, foreign.replica_names)
    files = tuple(
        FileEntry(file.name, rank, file.size, 0, file.size, file.size, 0)
        for rank, file in enumerate(foreign.files)
    )
    manifest = Manifest(
        format=foreign.format,
        save_id="",
        step=foreign.step,
        created="",
        world_size=foreign.world_size,
        files=files,
        objects=foreign.objects,
        tensors=tuple(shown),
    )
    held, stride = ForeignFiles(tree, foreign.files), foreign.table.stride
    sums = partial(sums_of, tree, [file.name for file in foreign.files if file.content is None])
    lacking = (f"{name}: {said} is missing" for name, said in foreign.absent.items())
    return Opened(
        held,
        manifest,
        moved,
        stride,
        parts,
        (*foreign.left_out, *lacking),
        foreign.absent,
        replicas,
        sums,
    )
