"""The options of an export, and the export of the tensors and values that they choose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shardwise.convert.plan import Chosen, Parts, Written, nothing_below
from shardwise.convert.targets import TARGETS
from shardwise.convert.write import SMALLEST_MEMORY, Compared, Conversion, ConversionReport
from shardwise.engine.buffers import Arena
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import StateError
from shardwise.events import Recorder
from shardwise.manifest.manifest import Manifest, encode_manifest
from shardwise.state.selection import Selection
from shardwise.store import local_path, open_store

MAX_MEMORY = 1 << 30
MAX_FILE = 5 << 30
FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What `export`, `average` and `merge_lora` write, and where: see `shardwise.export`."""

    target: str | os.PathLike[str]
    to: str
    only: Sequence[str]
    skip: Sequence[str]
    root: str
    dtype: str | None
    config: str | os.PathLike[str] | None
    verify: bool
    max_memory: int
    max_file: int

    @property
    def identity(self) -> str:
        """The options that must be equal on all ranks, and when an export is resumed."""
        return (
            f"{Path(self.target)}, {self.to}, {self.only}, {self.skip}, {self.root}, {self.dtype}, "
            f"{self.max_file}"
        )

    def check(self) -> None:
        """Refuse invalid values.

        Raises:
            StateError: names the option.
        """
        self.folder()
        if self.to not in TARGETS:
            raise StateError(f"to={self.to!r}: unknown format; choose one of {', '.join(TARGETS)}")
        if self.config is not None and self.to != "hf":
            raise StateError(f"config={os.fspath(self.config)!r}: only used with to='hf'")
        if self.config is not None and not os.path.isfile(self.config):
            raise StateError(f"config={os.fspath(self.config)!r}: not a file")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise StateError(f"dtype={self.dtype!r}: choose one of {', '.join(FLOATS)}")
        for name, bound, least in (
            ("max_memory", self.max_memory, SMALLEST_MEMORY),
            ("max_file", self.max_file, 1),
        ):
            if type(bound) is not int or bound < least:
                raise StateError(f"{name}={bound!r}: expected a number of bytes, at least {least}")

    def folder(self) -> Path:
        """Return the target as a path.

        Raises:
            StateError: the target is not in a file system.
        """
        store = open_store(self.target)
        path = local_path(store)
        if path is None:
            raise StateError(f"{store}: the target of an export must be a directory")
        return path


def write_export(
    options: ExportOptions,
    manifest: Manifest,
    source: Callable[[Arena], Parts],
    compared: Compared,
    source_id: str,
    left_out: Sequence[str],
    group: Group,
    recorder: Recorder,
) -> ConversionReport:
    """Write the chosen tensors and values of a manifest. All ranks of the group call it together.

    Args:
        source: makes the source of the tensors, which reads through the given arena.
        compared: checkpoints whose copies of tensors are compared first: see `Conversion`.
        source_id: identifies the source, so that only the same export is resumed.
        left_out: what the source itself left out, and why.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        StateError: nothing is chosen, or the format cannot hold something.
        MismatchError: a source stores a tensor several times, and the copies differ.
        CorruptionError: the source is damaged, or a written file does not read back as written.
    """
    identity = f"{source_id}: {options.identity}"
    chosen, tensors = _choose(options, manifest)
    save_id = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
    config = None if options.config is None else Path(options.config).read_bytes()
    target = TARGETS[options.to](
        Chosen(chosen, tensors, save_id, options.root, options.max_file, config)
    )
    return Conversion(
        source=source,
        compared=compared if options.verify else [],
        target=target,
        folder=options.folder(),
        identity=identity,
        max_memory=options.max_memory,
        left_out=tuple(left_out),
        group=group,
        recorder=recorder,
    ).run()


def digest_of(opened: Opened) -> str:
    """Return an identifier of a source: its path, and a digest of its manifest and pieces."""
    pieces = opened.pieces
    digest = hashlib.blake2b(encode_manifest(opened.manifest), digest_size=16)
    for column in (pieces.tensor, pieces.file, pieces.start, pieces.offset, opened.stride):
        digest.update(np.ascontiguousarray(column).tobytes())
    return f"{opened.store}: {digest.hexdigest()}"


def _choose(options: ExportOptions, manifest: Manifest) -> tuple[Manifest, tuple[Written, ...]]:
    """Return the chosen values and tensors.

    A tensor that is tied to one that is not chosen, or not converted alike, is written itself.
    """
    selection, root, dtype = Selection.by(options.only, options.skip), options.root, options.dtype
    tensors = [each for each in manifest.tensors if selection.chooses(each.name)]
    if not tensors:
        raise StateError("nothing to write: only= and skip= leave no tensor")
    names = dict.fromkeys(each.name for each in tensors)
    start = f"{root}." if root else ""
    converted = {name for name in names if dtype is not None and name.startswith(start)}
    if dtype is not None and not converted:
        raise StateError(f"dtype={dtype!r}: {nothing_below(root, names)}")
    written = []
    for each in tensors:
        stays_tied = each.same_as in names and (
            (each.same_as in converted) == (each.name in converted)
        )
        entry = each if stays_tied else msgspec.structs.replace(each, same_as=None)
        converts = each.name in converted and each.dtype in FLOATS
        written.append(Written(each.name, entry, dtype if dtype and converts else each.dtype))
    objects = tuple(each for each in manifest.objects if selection.chooses(each.name))
    return msgspec.structs.replace(manifest, objects=objects), tuple(written)
