"""Open the checkpoint at a place: a shardwise checkpoint, or a foreign checkpoint.

The readers of foreign checkpoints are half of the library, so they are imported only if a place has
a foreign checkpoint.
"""

from __future__ import annotations

import difflib
import logging
import operator
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NoReturn, SupportsIndex

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.root import Best, Choice, Root, parse_choice, steps_in
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    FormatError,
    StateError,
    StoreError,
    StoreUnavailableError,
    storage_errors,
)
from shardwise.kernel.manifest.layout import Layout, encode_layout
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    is_file_of_save,
    step_directory,
)
from shardwise.kernel.manifest.validate import layout_of_manifest
from shardwise.kernel.store import (
    Files,
    Store,
    exists,
    is_file,
    name_of,
    parent_of,
)
from shardwise.ports import foreign
from shardwise.ports.foreign import Specification

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How to read a checkpoint; see `shardwise.open`.

    Attributes:
        spec: the specification of how to assemble the tensors.
        skip_unknown: skip pickled values of unknown classes instead of raising.
        format: the format to read if the directory has several.
        step: the selected step, if the place is the root of a run; else the step of the checkpoint.
    """

    spec: Specification | None = None
    skip_unknown: bool = False
    format: str | None = None
    step: Choice = "newest"

    def __post_init__(self) -> None:
        if self.spec is not None and not foreign.is_specification(self.spec):
            raise StateError(f"spec={self.spec!r}: expected a specification; make one with sw.spec")


DEFAULT_OPTIONS = OpenOptions()
MOST_CHOICES = 5
"""How often a step is chosen, if retention removes each before it is opened."""


def agree_to_open(
    all_ranks: Round,
    store: Store,
    group: Group,
    cleanup: ExitStack,
    options: OpenOptions = DEFAULT_OPTIONS,
    settings: str = "",
) -> Callable[[], tuple[Files, Layout]]:
    """Agree with the other ranks on the checkpoint at a place. It may be a foreign checkpoint.

    Rank 0 chooses the step if the place is the root of a run, and reads the manifest, or the layout
    of the foreign files.

    Args:
        all_ranks: the round that ends with this call.
        store: the place, as this rank knows it.
        group: the ranks.
        cleanup: on rank 0, keeps the checkpoint from being removed until it closes.
        options: the options for reading the checkpoint.
        settings: further settings, as text, which must be equal on all ranks.

    Returns:
        A function that checks on every rank what rank 0 has read, and returns the files of the
        checkpoint and their layout. All ranks call it together, after the round.

    Raises:
        MismatchError: ranks pass different arguments.
        ShardwiseError: as for `shardwise.open`; so does the returned function.
    """
    own: Layout | None = None

    def open_first() -> _Opened:
        nonlocal own
        opened, own = _open_first(store, options, cleanup, encodes=group.size > 1)
        return opened

    directory, manifest, encoded, steps = all_ranks.require_equal(
        {"": f"{store}, step={options.step} {settings}"},
        "ranks do not load the same checkpoint in the same way; pass the same arguments on all "
        "ranks:",
        open_first,
        _Opened,
    )
    place = store.at(directory) if directory else store
    return lambda: _check_opened(place, manifest, own or encoded, steps, options, group)


@prepare_decoding
class _Steps(msgspec.Struct, array_like=True):
    """The step that the caller states for a checkpoint, and that in its path; None if unknown."""

    stated: int | None
    in_path: int | None


_Opened = tuple[str, bytes | None, bytes, _Steps]
"""The directory of the chosen step, "" if there is none; the manifest, or None and the encoded
layout of a foreign checkpoint; and the steps."""


def _open_first(
    store: Store, options: OpenOptions, cleanup: ExitStack, *, encodes: bool
) -> tuple[_Opened, Layout | None]:
    """Choose the step of a root, and read what is there; also return the layout of foreign files.

    Args:
        encodes: whether to encode that layout for other ranks.
    """
    own, encoded = None, b""
    directory, place, manifest = _open_chosen_step(store, options, cleanup)
    steps = _find_steps(place, options.step, is_chosen=directory != "")
    if manifest is not None and options.format is not None:
        raise StateError(
            f"{place} is a shardwise checkpoint, but format={options.format!r} selects "
            "another format: leave out format="
        )
    if manifest is None:
        own = _read_foreign(place, options)
        if encodes:
            encoded = encode_layout(own)
    return (directory, manifest, encoded, steps), own


def _check_opened(
    store: Store,
    manifest: bytes | None,
    other: Layout | bytes,
    steps: _Steps,
    options: OpenOptions,
    group: Group,
) -> tuple[Files, Layout]:
    """Check on all ranks what rank 0 has read, and return the files and their layout."""
    with Round(group, "checking a checkpoint"):
        if manifest is not None:
            files: Files = store
            layout = _open_manifest(store, manifest, checks_sizes=group.rank == 0)
        else:
            files, layout = foreign.check_layout(store, other)
        layout = _with_step(layout, steps, store)
    if group.rank == 0:
        for name, file in layout.missing_files.items():
            log.warning("%s: the file %s is missing, so %s cannot be loaded", files, file, name)
    return files, layout if options.spec is None else options.spec.apply(str(files), layout)


def _find_steps(place: Store, step: Choice, *, is_chosen: bool) -> _Steps:
    """Return the steps of a checkpoint that are known without its files.

    Args:
        place: the checkpoint.
        step: the user's `step=`.
        is_chosen: whether `step` has chosen this checkpoint in a root.
    """
    return _Steps(
        None if is_chosen or isinstance(step, (str, Best)) else operator.index(step),
        foreign.step_in_path(place),
    )


def _with_step(layout: Layout, steps: _Steps, store: Store) -> Layout:
    """Return a layout with the step that it records, or else that the caller states, or its path.

    Raises:
        StateError: the caller states a step, and the checkpoint records one.
    """
    if layout.step is None:
        step = steps.in_path if steps.stated is None else steps.stated
        return layout if step is None else replace(layout, step=step)
    if steps.stated is not None:
        raise StateError(
            f"step={steps.stated}: {store} is not the root of a run, which has a directory for "
            f"each step, but a checkpoint that records its step, {layout.step}: leave out step="
        )
    return layout


def _open_chosen_step(
    store: Store, options: OpenOptions, cleanup: ExitStack
) -> tuple[str, Store, bytes | None]:
    """Choose the step of a root, and read its manifest.

    If retention removes the step before it is opened, another one is chosen, unless the user has
    chosen the step by its number.

    Args:
        store: the place.
        options: the options for reading the checkpoint.
        cleanup: keeps the checkpoint from being removed until it closes.

    Returns:
        The name of the directory of the step, or "" if the place is not the root of a run; the
        directory; and the result of `_find_manifest`.
    """
    for chosen in range(MOST_CHOICES + 1):
        directory = _choose_directory(store, options)
        place = store.at(directory) if directory else store
        with ExitStack() as lock:
            lock.enter_context(CheckpointDirectory(place).lock_for_reading())
            try:
                manifest = _find_manifest(place)
            except CheckpointNotFoundError:
                if (
                    not directory
                    or isinstance(options.step, SupportsIndex)
                    or chosen == MOST_CHOICES
                ):
                    raise
            else:
                cleanup.push(lock.pop_all())
                break
    return directory, place, manifest


def _find_manifest(store: Store) -> bytes | None:
    """Return the manifest of a shardwise checkpoint; None if there may be a foreign one.

    Raises:
        CheckpointNotFoundError: there is neither.
        FormatError: the manifest is too large, or not a regular file.
        StoreUnavailableError: the storage does not answer.
    """
    try:
        return CheckpointDirectory(store).read()
    except (FileNotFoundError, NotADirectoryError):
        if name_of(store) == MANIFEST and is_file(store):
            raise CheckpointNotFoundError(
                f"{store} is a file inside a checkpoint: pass its directory, {parent_of(store)}"
            ) from None
        if _may_be_foreign(_names_at(store)):
            return None
        raise CheckpointNotFoundError(_describe_missing(store)) from None
    except StoreUnavailableError:  # this error says nothing about the manifest
        raise
    except StoreError as error:
        raise FormatError(str(error)) from error


def _read_foreign(store: Store, options: OpenOptions) -> Layout:
    return foreign.read_layout(
        store, spec=options.spec, skip_unknown=options.skip_unknown, format=options.format
    )


def _open_manifest(store: Store, data: bytes, *, checks_sizes: bool) -> Layout:
    """Decode and check the manifest of a shardwise checkpoint.

    Args:
        store: the files of the checkpoint.
        data: the content of the manifest.
        checks_sizes: whether to compare the sizes of files with the store before a very large table
            of pieces is allocated. In a load, only one rank needs to.

    Raises:
        FormatError: the manifest is invalid.
        CorruptionError: a file is missing whose size had to be compared.
    """
    manifest = CheckpointDirectory(store).decode(data)
    try:
        return layout_of_manifest(manifest, store if checks_sizes else None)
    except FormatError as error:
        raise FormatError(f"{store}: {error}; load another checkpoint") from error


def _describe_missing(store: Store) -> str:
    """Return why a store has no checkpoint, for an error message."""
    names = store.list()
    if not names:
        hint, parent = "; check the path", parent_of(store)
        if _HUB_ID.fullmatch(str(store)) and (parent is None or not exists(parent)):
            hint = (
                "; if this is the id of a model on the Hugging Face Hub, download it and pass the "
                f"directory, such as huggingface_hub.snapshot_download({str(store)!r})"
            )
        elif parent is not None:
            others = [name for name in parent.list() if name != name_of(store)]
            near = difflib.get_close_matches(name_of(store), others, n=3)
            if near:
                hint = f"; did you mean {' or '.join(str(parent.at(name)) for name in near)}?"
            elif not exists(parent):
                hint = (
                    f"; {parent} does not exist either: check the path, and whether its file "
                    "system is mounted on this machine"
                )
        return f"{store} does not exist or is empty: there is no checkpoint{hint}"
    if CheckpointDirectory(store).state(names) == "removed":
        return f"{store} was removed by retention or `shardwise rm`: load another step"
    return (
        f"{store} has no {MANIFEST}: there is no checkpoint, or its save has not finished; load "
        "another checkpoint, or wait for the save"
    )


def _choose_directory(store: Store, options: OpenOptions) -> str:
    """Return the name of the directory of a step, if a place is the root of a run, or ""."""
    step = parse_choice(options.step)
    names = Root(store).names()
    is_ours = CheckpointDirectory(store).state(names) == "committed"
    if not is_ours and steps_in(names):
        return step_directory(Root(store).choose(step))
    if isinstance(step, Best):
        raise StateError(
            f"step={step!r}: {store} is not the root of a run, which has a directory for each "
            "step; to read a checkpoint itself, leave out step="
        )
    is_read_here = is_ours or (options.spec is not None and options.spec.files is not None)
    return "" if is_read_here else foreign.find_directory(store, names, step)


def raise_for_missing_root(store: Store) -> NoReturn:
    """Say what is at a place that holds no checkpoints of shardwise.

    Raises:
        CheckpointNotFoundError: always.
    """
    if formats := foreign_formats_at(store):
        raise CheckpointNotFoundError(
            f"{store} is one checkpoint ({formats}), not a directory of shardwise checkpoints: "
            "open it with sw.open or `shardwise inspect`; to remove it, delete its files"
        )
    if _find_manifest(store) is None:
        _read_foreign(store, DEFAULT_OPTIONS)
    raise CheckpointNotFoundError(f"{store} holds no checkpoints")  # removed or added meanwhile


def foreign_formats_at(store: Store) -> str:
    """Return the names of the foreign formats at a place; "" if there is none."""
    return _formats_at(store, _names_at(store))


def _formats_at(store: Store, names: Sequence[str] | None) -> str:
    """Return the names of the foreign formats at a place; "" if there is none.

    Args:
        names: the result of `_names_at`.
    """
    if not _may_be_foreign(names):
        return ""
    with suppress(FormatError):  # a read of the checkpoint reports the error
        directory = foreign.find_directory(store, names or (), "newest")
        store = store.at(directory) if directory else store
    return foreign.formats_at(store)


def _may_be_foreign(names: Sequence[str] | None) -> bool:
    """Return whether a place with these names below may have a foreign checkpoint.

    The result is False if there is nothing, or a root or an unfinished save of shardwise.
    """
    if not names:
        return names is None
    return not any(map(is_file_of_save, names)) and not steps_in(names)


def _names_at(store: Store) -> list[str] | None:
    """Return the names below a place; None for a file."""
    if is_file(store):
        return None
    try:
        return store.list()
    except NotADirectoryError:
        return None


def refuse_as_destination(store: Store) -> None:
    """Refuse to save one checkpoint to a foreign checkpoint, a file, or the root of a run.

    Raises:
        CheckpointExistsError: the place has a foreign checkpoint, or checkpoints of a run.
        StateError: the path is a file.
        StoreError: the place cannot be listed.
    """
    with storage_errors(store):
        names = _names_at(store)
    if names == []:
        return
    if formats := _formats_at(store, names):
        raise CheckpointExistsError(
            f"Checkpoint already exists: {store} has a checkpoint of {formats}, which a save never "
            "replaces: save into another directory"
        )
    if names is None:
        raise _file_error(store)
    if steps := steps_in(names):
        raise CheckpointExistsError(
            f"{store} is the root of a run, with a directory for each step (such as "
            f"{step_directory(max(steps))}): a checkpoint directly in the root would hide them. "
            "Save with a Checkpointer of this root, or into another directory"
        )


def steps_in_root(store: Store, *, may_be_foreign: bool) -> list[int]:
    """Return the steps that have a directory in a root. Refuse a checkpoint or a file as a root.

    Args:
        may_be_foreign: do not refuse a foreign checkpoint.

    Raises:
        CheckpointExistsError: the place is a checkpoint.
        StateError: the place is a file.
    """
    if is_file(store):
        raise _file_error(store)
    names = store.list()
    is_checkpoint = CheckpointDirectory(store).state(names) == "committed"
    if is_checkpoint and steps_in(names):
        raise CheckpointExistsError(
            f"{store} is the root of a run, but a save went directly into the root: it has "
            f"{MANIFEST} beside the directories of steps. Move {MANIFEST} and all r*.safetensors "
            "from the root into a new directory, which is then a checkpoint, or delete them"
        )
    if is_checkpoint:
        formats = "shardwise"
    elif may_be_foreign:
        formats = ""
    else:
        formats = _formats_at(store, names)
    if formats:
        raise CheckpointExistsError(
            f"{store} is a checkpoint of {formats}, not the root of a run: pass another directory "
            f"as the root, and start_from={str(store)!r} to start from this checkpoint"
        )
    return steps_in(names)


def _file_error(store: Store) -> StateError:
    return StateError(
        f"{store} is a file: pass another path, or remove the file. The path is that of a "
        "directory, which a save creates if it does not exist"
    )
