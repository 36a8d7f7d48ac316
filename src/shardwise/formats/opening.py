"""Open a foreign checkpoint: describe its files, and check the description."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from shardwise.engine.opened import ForeignDetails, Opened, Replicas
from shardwise.errors import FormatError, MismatchError
from shardwise.formats.checksums import read_checksums
from shardwise.formats.detect import find_readers, read_foreign
from shardwise.formats.file_tree import FileTree, ForeignFiles
from shardwise.formats.foreign import Foreign
from shardwise.formats.index import decode_index, encode_index, read_or_write_index
from shardwise.formats.options import OpenOptions
from shardwise.formats.validate import validate_foreign
from shardwise.manifest.manifest import FileEntry, Manifest
from shardwise.store import Store


def formats_at(store: Store) -> str:
    """Return the names of the foreign formats at a place; "" if there is none."""
    try:
        return " and ".join(reader.name for reader in find_readers(FileTree(store)).values())
    except (FormatError, OSError):  # a read of the checkpoint reports the error
        return ""


def describe_foreign(store: Store, options: OpenOptions) -> bytes:
    """Return the encoded index of a foreign checkpoint.

    Raises:
        CheckpointNotFoundError: no known format is recognised.
        FormatError: the checkpoint is malformed.
        MismatchError: the specification does not fit the checkpoint.
    """
    tree = FileTree(store, skip_unknown=options.skip_unknown)
    spec = options.spec if options.spec is not None and options.spec.files is not None else None
    read = partial(read_foreign, format=options.format) if spec is None else spec.read
    try:
        if options.index is None:
            return encode_index(read(tree))
        settings_text = f"{spec}, {options.skip_unknown}, {options.format}"
        return read_or_write_index(tree, options.index, read, settings_text)
    except FormatError as error:
        if tree.is_named_in(str(error)):
            raise
        raise FormatError(f"{tree}: {error}") from error
    except MismatchError as error:
        if tree.is_named_in(str(error)):
            raise
        raise MismatchError(f"{tree}: {error.summary}", error.problems) from error


def open_description(store: Store, description: bytes) -> Opened:
    """Return the foreign checkpoint that an encoded index describes.

    Raises:
        FormatError: the description is inconsistent.
    """
    return convert_to_opened(FileTree(store), decode_index(description, str(store)))


def convert_to_opened(tree: FileTree, foreign: Foreign) -> Opened:
    """Check the description of a foreign checkpoint, and return it as an `Opened` checkpoint.

    Raises:
        FormatError: the description is inconsistent.
    """
    try:
        foreign = validate_foreign(foreign)
    except FormatError as error:
        raise FormatError(f"{tree}: {error}") from error
    # The versions of which a tensor is the average are read, but not listed.
    hidden = {name for names in foreign.averages.values() for name in names}
    shown = [tensor for tensor in foreign.tensors if tensor.name not in hidden]
    index_of = {tensor.name: i for i, tensor in enumerate(shown)}
    averages: dict[int, tuple[int, ...]] = {}
    for name, versions in foreign.averages.items():
        index_of |= {each: len(index_of) + k for k, each in enumerate(versions)}
        averages[index_of[name]] = tuple(index_of[each] for each in versions)
    new_index = np.array([index_of[tensor.name] for tensor in foreign.tensors], np.int64)
    pieces = foreign.table.pieces
    copies = foreign.replicas.pieces
    reindexed = replace(pieces, tensor=new_index[pieces.tensor])
    copies = replace(copies, tensor=new_index[copies.tensor])
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
    store, stride = ForeignFiles(tree, foreign.files), foreign.table.stride
    stored = [file.name for file in foreign.files if file.content is None]
    missing = (f"{name}: {file} is missing" for name, file in foreign.missing_files.items())
    return Opened(
        store,
        manifest,
        reindexed,
        stride,
        replicas,
        (*foreign.left_out, *missing),
        ForeignDetails(averages, foreign.missing_files, partial(read_checksums, tree, stored)),
    )
