"""export: a checkpoint of any format, written anew in any other."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from shardwise.api import Index, Place, resolved_group
from shardwise.convert.chosen import Chosen, Written, nothing_below
from shardwise.convert.conversion import SMALLEST_MEMORY, Conversion, ConversionReport
from shardwise.convert.targets import TARGETS
from shardwise.engine.collection import without_collection
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import StateError
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.manifest.manifest import Manifest, encode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.opening import Reading, open_any
from shardwise.state.selection import Selection
from shardwise.store import LocalStore, Store, open_store

MAX_MEMORY = 1 << 30
MAX_FILE = 5 << 30
FLOATS = ("float64", "float32", "float16", "bfloat16")


def export(
    place: Place,
    target: str | os.PathLike[str],
    *,
    to: str = "hf",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    root: str = "model",
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    verify: bool = True,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - as it is called everywhere
    index: Index | None = None,
    max_memory: int = MAX_MEMORY,
    max_file: int = MAX_FILE,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write a checkpoint anew, in our format or another. All ranks call it, and share the work.

    If it is broken off, the same call goes on with it. All that was written is read again before
    the files that make it a checkpoint are.

    Args:
        place: a checkpoint, of ours or of a foreign format.
        target: a new directory.
        to: `"hf"` (safetensors), `"dcp"` (torch.distributed.checkpoint), `"torch"` (one file of
            torch.save), `"deepspeed-universal"` (for ZeRO 1, 2 and 3), or `"native"`.
        only, skip, group, on_event: as for `load`; the first two choose what is written.
        root: formats that hold a model alone have what is below this name, without it; "": all.
        dtype: convert the model's floating-point tensors to it.
        config: the model's configuration, a file that `"hf"` has a copy of as `config.json`.
        verify, spec, skip_unknown, format, index: as for `open`; all of each copy is compared.
        max_memory, max_file: bounds on each rank's host memory, on tensors in a file; in bytes.

    Raises:
        CheckpointExistsError: the target holds something else, or another process writes there.
        StateError: an option is none, or the format cannot hold something.
        MismatchError: the source stores a tensor several times, and the copies differ.
        CorruptionError: the source is damaged; or what was written is not read back as it was.
    """
    recorder = Recorder(on_event)
    with without_collection(), resolved_group(group) as ranks, ExitStack() as cleanup:

        def enter() -> Store:
            _check(target, to, dtype, config, max_memory, max_file)
            store = open_store(place)
            cleanup.enter_context(store.hold(MANIFEST, shared=True))
            return store

        with recorder.stage("open"):
            terms = f"{Path(target)}, {to}, {only}, {skip}, {root}, {dtype}, {max_file}"
            opened = open_any(enter, ranks, terms, Reading(spec, index, skip_unknown, format))
        identity = f"{opened.store}: {_digest(opened)}: {terms}"
        source, tensors = _choose(opened, Selection.by(only, skip), root, dtype)
        chosen = Chosen(source, tensors, _id_of(identity), root, max_file, _content(config))
        laid, folder = TARGETS[to](chosen), _folder(target)
        return Conversion(opened, laid, folder, identity, max_memory, verify, ranks, recorder).run()


def _folder(target: str | os.PathLike[str]) -> Path:
    store = open_store(target)
    if not isinstance(store, LocalStore):
        raise StateError(f"{store}: a conversion writes into a directory")
    return store.path


def _check(
    target: str | os.PathLike[str],
    to: str,
    dtype: str | None,
    config: str | os.PathLike[str] | None,
    max_memory: int,
    max_file: int,
) -> None:
    _folder(target)
    if to not in TARGETS:
        raise StateError(f"to={to!r}: formats that are written are {', '.join(TARGETS)}")
    if config is not None and (to != "hf" or not os.path.isfile(config)):
        raise StateError(f"config={os.fspath(config)!r}: a file is needed, and to='hf'")
    if dtype is not None and dtype not in FLOATS:
        raise StateError(f"dtype={dtype!r}: one of {', '.join(FLOATS)} is needed")
    for name, bound, least in (
        ("max_memory", max_memory, SMALLEST_MEMORY),
        ("max_file", max_file, 1),
    ):
        if type(bound) is not int or bound < least:
            raise StateError(f"{name}={bound!r}: a number of bytes is needed, at least {least}")


def _choose(
    opened: Opened, selection: Selection, root: str, dtype: str | None
) -> tuple[Manifest, tuple[Written, ...]]:
    """What is chosen of a checkpoint; a tensor that is tied to what is not is written itself."""
    manifest = opened.manifest
    tensors = [each for each in manifest.tensors if selection.chooses(each.name)]
    if not tensors:
        raise StateError(f"{opened.store}: nothing to write: only= and skip= leave no tensor")
    names = dict.fromkeys(each.name for each in tensors)
    start = f"{root}." if root else ""
    converted = {name for name in names if dtype is not None and name.startswith(start)}
    if dtype is not None and not converted:
        raise StateError(f"dtype={dtype!r}: {nothing_below(root, names)}")
    written = []
    for each in tensors:
        alike = each.same_as in names and (each.same_as in converted) == (each.name in converted)
        entry = each if alike else msgspec.structs.replace(each, same_as=None)
        converts = each.name in converted and each.dtype in FLOATS
        written.append(Written(each.name, entry, dtype if dtype and converts else each.dtype))
    objects = tuple(each for each in manifest.objects if selection.chooses(each.name))
    return msgspec.structs.replace(manifest, objects=objects), tuple(written)


def _content(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _id_of(identity: str) -> str:
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _digest(opened: Opened) -> str:
    """What the source is, in brief: its manifest, and where its pieces lie."""
    pieces = opened.pieces
    digest = hashlib.blake2b(encode_manifest(opened.manifest), digest_size=16)
    for column in (pieces.tensor, pieces.file, pieces.start, pieces.offset, opened.stride):
        digest.update(np.ascontiguousarray(column).tobytes())
    return digest.hexdigest()
