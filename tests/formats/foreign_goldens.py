"""Checkpoints of other frameworks, archived in tests/compat/foreign."""

from __future__ import annotations

import tarfile
from pathlib import Path

from shardwise.formats.detect import read_foreign
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign
from shardwise.formats.validate import validate_foreign

GOLDEN = Path(__file__).parents[1] / "compat" / "foreign"


def unpacked(name: str, folder: Path) -> Path:
    """Unpack a checkpoint into a directory, and return the directory."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def opened(place: Path) -> Foreign:
    """Return the checked description of a checkpoint by the reader that recognises it."""
    return validate_foreign(read_foreign(FileTree(place)))
