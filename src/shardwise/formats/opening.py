"""Open a foreign checkpoint: read the layout of its files, and check the layout."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import FormatError, MismatchError
from shardwise.formats.detect import find_readers, read_foreign
from shardwise.formats.file_tree import FileTree, ForeignFiles
from shardwise.formats.specification import Specification
from shardwise.manifest.layout import Layout
from shardwise.manifest.validate import validate_layout
from shardwise.store import Store


def formats_at(store: Store) -> str:
    """Return the names of the foreign formats at a place; "" if there is none."""
    try:
        return " and ".join(reader.name for reader in find_readers(FileTree(store)).values())
    except (FormatError, OSError):  # a read of the checkpoint reports the error
        return ""


def read_layout(
    store: Store,
    *,
    spec: Specification | None,
    skip_unknown: bool,
    format: str | None,  # noqa: A002 - the usual name
) -> Layout:
    """Return the layout of a foreign checkpoint. `check_layout` checks it.

    Args:
        store: the place of the checkpoint.
        spec, skip_unknown, format: as for `shardwise.open`.

    Raises:
        CheckpointNotFoundError: no known format is recognised.
        FormatError: the checkpoint is malformed.
        MismatchError: the specification does not fit the checkpoint.
    """
    tree = FileTree(store, skip_unknown=skip_unknown)
    try:
        if spec is None or spec.files is None:
            return read_foreign(tree, format)
        return spec.read(tree)
    except FormatError as error:
        if tree.is_named_in(str(error)):
            raise
        raise FormatError(f"{tree}: {error}") from error
    except MismatchError as error:
        if tree.is_named_in(str(error)):
            raise
        raise MismatchError(f"{tree}: {error.summary}", error.problems) from error


def check_layout(store: Store, layout: Layout) -> tuple[ForeignFiles, Layout]:
    """Check the layout of a foreign checkpoint, and return it with the files.

    Raises:
        FormatError: the layout is inconsistent.
    """
    try:
        layout = validate_layout(layout)
    except FormatError as error:
        raise FormatError(
            f"{store}: {error}; copy the checkpoint again from an intact source, or open another "
            "one"
        ) from error
    missing = (f"{name}: {file} is missing" for name, file in layout.missing_files.items())
    files = ForeignFiles(FileTree(store), layout.files)
    return files, replace(layout, left_out=(*layout.left_out, *missing))
