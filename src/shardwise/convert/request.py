"""What a conversion is asked to write, checked, and the run of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shardwise.convert.chosen import Chosen, Written, nothing_below
from shardwise.convert.conversion import SMALLEST_MEMORY, Compared, Conversion, ConversionReport
from shardwise.convert.output import Parts
from shardwise.convert.targets import TARGETS
from shardwise.engine.buffers import Arena
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import StateError
from shardwise.events import Recorder
from shardwise.manifest.manifest import Manifest, encode_manifest
from shardwise.state.selection import Selection
from shardwise.store import LocalStore, open_store

MAX_MEMORY = 1 << 30
MAX_FILE = 5 << 30
FLOATS = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be written, and where: see `shardwise.export`."""

    target: str | os.PathLike[str]
    to: str
    only: Sequence[str]
    skip: Sequence[str]
    root: str
    dtype: str | None
    config: str | os.PathLike[str] | None
    max_memory: int
    max_file: int

    @property
    def terms(self) -> str:
        """What must be the same on all ranks, and when a conversion is resumed."""
        return (
            f"{Path(self.target)}, {self.to}, {self.only}, {self.skip}, {self.root}, {self.dtype}, "
            f"{self.max_file}"
        )

    def check(self) -> None:
        """Refuse options that make no sense.

        Raises:
            StateError: names the option.
        """
        self._folder()
        if self.to not in TARGETS:
            raise StateError(f"to={self.to!r}: formats that are written are {', '.join(TARGETS)}")
        if self.config is not None and (self.to != "hf" or not os.path.isfile(self.config)):
            raise StateError(f"config={os.fspath(self.config)!r}: a file is needed, and to='hf'")
        if self.dtype is not None and self.dtype not in FLOATS:
            raise StateError(f"dtype={self.dtype!r}: one of {', '.join(FLOATS)} is needed")
        for name, bound, least in (
            ("max_memory", self.max_memory, SMALLEST_MEMORY),
            ("max_file", self.max_file, 1),
        ):
            if type(bound) is not int or bound < least:
                raise StateError(f"{name}={bound!r}: a number of bytes is needed, at least {least}")

    def run(
        self,
        manifest: Manifest,
        source: Callable[[Arena], Parts],
        compared: Compared,
        what: str,
        left_out: Sequence[str],
        group: Group,
        recorder: Recorder,
    ) -> ConversionReport:
        """Write what is chosen of a manifest. All ranks of the group call it together.

        Args:
            source: makes what the tensors are read from.
            compared: checkpoints whose copies of tensors are compared first: see `Conversion`.
            what: identifies the source, so that only the same conversion is resumed.
            left_out: what is known to be left out, and why.

        Raises:
            CheckpointExistsError: the target holds something else, or another process writes there.
            StateError: nothing is chosen, or the format cannot hold something.
            MismatchError: a source stores a tensor several times, and the copies differ.
            CorruptionError: the source is damaged, or what was written is not read back as it was.
        """
        identity = f"{what}: {self.terms}"
        chosen, tensors = self._choose(manifest)
        name = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        config = None if self.config is None else Path(self.config).read_bytes()
        laid = TARGETS[self.to](Chosen(chosen, tensors, name, self.root, self.max_file, config))
        folder, left = self._folder(), tuple(left_out)
        return Conversion(
            source, compared, laid, folder, identity, self.max_memory, left, group, recorder
        ).run()

    def _folder(self) -> Path:
        store = open_store(self.target)
        if not isinstance(store, LocalStore):
            raise StateError(f"{store}: a conversion writes into a directory")
        return store.path

    def _choose(self, manifest: Manifest) -> tuple[Manifest, tuple[Written, ...]]:
        """What is chosen; a tensor that is tied to one that is not chosen is written itself."""
        selection, root, dtype = Selection.by(self.only, self.skip), self.root, self.dtype
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
            alike = each.same_as in names and (each.same_as in converted) == (
                each.name in converted
            )
            entry = each if alike else msgspec.structs.replace(each, same_as=None)
            converts = each.name in converted and each.dtype in FLOATS
            written.append(Written(each.name, entry, dtype if dtype and converts else each.dtype))
        objects = tuple(each for each in manifest.objects if selection.chooses(each.name))
        return msgspec.structs.replace(manifest, objects=objects), tuple(written)


def digest_of(opened: Opened) -> str:
    """What a source is, in brief: its place, its manifest, and where its pieces lie."""
    pieces = opened.pieces
    digest = hashlib.blake2b(encode_manifest(opened.manifest), digest_size=16)
    for column in (pieces.tensor, pieces.file, pieces.start, pieces.offset, opened.stride):
        digest.update(np.ascontiguousarray(column).tobytes())
    return f"{opened.store}: {digest.hexdigest()}"
