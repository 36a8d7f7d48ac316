"""Checkpoints of other frameworks, archived in tests/compat/foreign."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any
from unittest import mock

import shardwise as sw
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.validate import validate_layout
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.foreign_builder import Builder
from shardwise.parts.formats.opening import load_readers, read_foreign

GOLDEN = Path(__file__).parents[1] / "compat" / "foreign"


def unpacked(name: str, folder: Path, golden: Path = GOLDEN) -> Path:
    """Unpack a checkpoint into a directory, and return the directory."""
    with tarfile.open(golden / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def describe(reader: Any, tree: FileTree, *args: Any, **options: Any) -> Layout:
    """Return what a reader describes; the reader is a module."""
    builder = Builder(tree)
    reader.read(tree, builder, *args, **options)
    return builder.build(reader.READER.name)


def values_of(place: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint by name."""
    found = sw.open(place).items()
    return {name: value for name, value in found if not isinstance(value, sw.SavedTensor)}


def opened(place: Path) -> Layout:
    """Return the checked description of a checkpoint by the reader that recognises it."""
    return validate_layout(read_foreign(FileTree(place)))


def formats_read() -> set[str]:
    """Return the names of all formats that shardwise reads itself."""
    with mock.patch.dict(os.environ, {"SHARDWISE_PLUGINS": "off"}):
        of_packages = {"legacy Megatron-LM", "torchsnapshot"}  # only recognised
        return {reader.name for reader in load_readers().values()} - of_packages
