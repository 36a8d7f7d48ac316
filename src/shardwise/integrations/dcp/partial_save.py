"""`PartialSave`: save one checkpoint by processes that are not in a process group of shardwise.

DCP itself sends the results of all ranks to its coordinator. So this save has none of the rounds of
`sw.save`, and calls the kernel's stages of a save one by one: describe, lay out, write, commit. It
is the only module of the drop-ins that uses inner names; the tests of the structure list them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

import shardwise as sw
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.describe import BoundState, describe_tensors
from shardwise.kernel.engine.planning import SaveRequest
from shardwise.kernel.engine.save import prepare_place
from shardwise.kernel.engine.shared_values import merge_values
from shardwise.kernel.engine.write_file import FileSource, write_data_file
from shardwise.kernel.manifest.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    check_name,
    encode_header_entries,
    encode_manifest,
    lay_out_file,
)
from shardwise.kernel.manifest.pieces import encode_tensors_with
from shardwise.kernel.manifest.validate import layout_of_manifest
from shardwise.kernel.opening import refuse_as_destination
from shardwise.kernel.plan.save import piece_table
from shardwise.kernel.state.local_state import LocalState, TensorLeaf
from shardwise.kernel.state.plain_values import JsonValue, encode
from shardwise.kernel.state.tensors import tensor_of_array
from shardwise.kernel.store import Store, open_store
from shardwise.ports.binding import is_shard, tensor_leaf

DIFFERENT_VALUES = (
    "processes wrote different values with the same name; write each value in one process, or "
    "under a name for each process:"
)
Tensor = torch.Tensor | np.ndarray[Any, Any] | sw.Shards


@dataclass(frozen=True, slots=True)
class SavedPart:
    """What a process wrote for a `PartialSave`. It can be pickled, and has no tensor data.

    Attributes:
        path: the path or URL of the checkpoint, as the process knows it.
        rank: the number of the process.
        file: the data file; None if the process had no tensor data.
        tensors: the tensors that the process has a part of.
        boxes: for each box in the file: the index in `tensors`, the first byte in the data section,
            the offset and the shape.
        values: the plain values, encoded.
    """

    path: str
    rank: int
    file: FileEntry | None
    tensors: tuple[TensorEntry, ...]
    boxes: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]
    values: Mapping[str, JsonValue]


class PartialSave:
    """A save by processes that send each other nothing: each writes a part, and one commits.

    The results of all processes must reach one of them. If the object is dropped before `commit`,
    nothing is published.

    Example:

        save = PartialSave("checkpoints/3")
        save.begin(world_size=2)                       # on the process that will commit
        part = save.write({"w": shards}, rank=rank)    # on each process, with an object of its own
        save.commit([part_0, part_1])

    Args:
        place, step, overwrite, metrics, allow_pickle, staging_bytes: as for `StorageWriter`.

    Raises:
        StateError, ValueError: an option is invalid.
        StoreError: the path or URL is invalid.
    """

    def __init__(
        self,
        place: str | os.PathLike[str] | Store,
        *,
        step: int | None = None,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None = None,
        allow_pickle: bool = False,
        staging_bytes: int = 64 << 20,
    ) -> None:
        self._allow_pickle = allow_pickle
        self._request = SaveRequest(
            state=BoundState(LocalState()),
            store=open_store(place),
            arena=Arena(staging_bytes),
            step=step,
            overwrite=overwrite,
            metrics=metrics or {},
        )
        self._lock = ExitStack()
        self._world_size: int | None = None  # until `begin`
        self.save_id = self._request.save_id
        self._release: Callable[[], object] = weakref.finalize(self, self._lock.close)

    def begin(self, *, world_size: int, nbytes: int = 0) -> None:
        """Lock the place of the checkpoint, before any process writes.

        Args:
            world_size: the number of processes.
            nbytes: the bytes of all tensors, which must fit into the storage.

        Raises:
            CheckpointExistsError: the place has a foreign checkpoint or the root of a run, or
                another checkpoint and `overwrite` is not set.
            StoreError, OSError: the place cannot be locked, or has too little room.
        """
        refuse_as_destination(self._request.store)
        self._world_size = world_size
        self._request.check_room(nbytes)
        prepare_place(self._request, self._lock)

    def write(
        self, tensors: Mapping[str, Tensor], values: Mapping[str, Any] | None = None, *, rank: int
    ) -> SavedPart:
        """Write the tensors of this process to one file, which is durable on return.

        Args:
            tensors: tensors, arrays and `Shards` by name. Exactly one process writes each element.
            values: plain values by name, also with tensors inside.
            rank: the number of this process.

        Raises:
            StateError: a tensor or value cannot be saved. The message names it.
            StoreError, OSError: the storage failed.
        """
        found = dict(tensors)
        encoded = {
            name: encode(value, name, found.__setitem__, allow_pickle=self._allow_pickle)
            for name, value in (values or {}).items()
        }
        leaves = [_leaf(name, tensor, tensors) for name, tensor in found.items()]
        description, fragments = describe_tensors(leaves)
        structure = description.structure
        entries = map(TensorEntry, structure.names, structure.dtypes, structure.shapes)
        # Wider types come first, so that every piece is aligned to its own type.
        itemsize = np.array([-each.data.element_size() for each in fragments], np.int64)
        order = np.argsort(itemsize, kind="stable")
        table = piece_table(description, order, description.offset[order], description.shape[order])
        tensor = description.tensor[order].tolist()
        rows = zip(tensor, table.start.tolist(), table.box, strict=False)
        boxes = [(i, start, box.offset, box.shape) for i, start, box in rows]
        file = None
        if fragments:
            header = encode_header_entries(table.describe_pieces(description))
            # The name has an id of its own: without `begin`, a process does not know the save's id.
            laid_out = lay_out_file(self.save_id, rank, header)
            file = self._write_file(FileSource(table, fragments, laid_out))
        path = str(self._request.store)
        return SavedPart(path, rank, file, tuple(entries), tuple(boxes), encoded)

    def _write_file(self, source: FileSource) -> FileEntry:
        store = self._request.store
        try:
            return write_data_file(store, source, self._request.arena)
        except BaseException:
            with suppress(OSError):
                store.delete(source.entry.name)
            raise

    def commit(
        self,
        parts: Iterable[SavedPart],
        values: Mapping[str, Any] | None = None,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        """Publish the checkpoint, after `begin` and after all processes have written their parts.

        Args:
            parts: the parts of all processes.
            values: further plain values.
            rename: the name in the checkpoint for each written name that changes.

        Raises:
            StateError: `begin` was not called; a value cannot be saved; a name is not allowed; or
                the ranks of the parts are not those of the processes.
            LayoutError: the boxes of a tensor leave gaps or overlap.
            MismatchError: processes wrote to different places, or have different dtypes or shapes
                of a tensor, or different values with one name.
            CheckpointExistsError: another process saved here meanwhile.
            StoreError, OSError: the storage failed.
        """
        try:
            manifest = self._manifest([*parts], values or {}, rename or {})
            encoded = encode_manifest(manifest)
            names = [file.name for file in manifest.files]
            directory = CheckpointDirectory(self._request.store)
            directory.commit(self.save_id, encoded, names, overwrite=self._request.overwrite)
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock of the save."""
        self._release()

    def _manifest(
        self, parts: list[SavedPart], values: Mapping[str, Any], rename: Mapping[str, str]
    ) -> Manifest:
        path, world = str(self._request.store), self._world_size
        _refuse_other_places(parts, path)
        if world is None:
            raise sw.StateError(
                f"commit of {path}: begin() was not called: call begin() on this object before the "
                "processes write"
            )
        _check_ranks(parts, world)
        values_of_rank: dict[int, tuple[dict[str, JsonValue], dict[str, Any]]] = {
            part.rank: (msgspec.json.decode(msgspec.json.encode(part.values)), {})
            for part in sorted(parts, key=lambda part: part.rank)
        }
        merged = merge_values(values_of_rank, {}, DIFFERENT_VALUES)
        objects = {each.name: each.value for each in merged}
        for name, value in values.items():
            objects[name] = encode(value, name, allow_pickle=self._allow_pickle)
        tensors = _unite_tensors(parts)
        files = sorted((p.file for p in parts if p.file is not None), key=lambda file: file.rank)
        file_index = {file.name: i for i, file in enumerate(files)}
        index = {name: i for i, name in enumerate(tensors)}
        rows = [
            (index[part.tensors[tensor].name], file_index[part.file.name], start, offset, shape)
            for part in parts
            if part.file is not None
            for tensor, start, offset, shape in part.boxes
        ]
        rows.sort(key=lambda row: (row[0], row[3]))
        named = [
            TensorEntry(rename.get(each.name, each.name), each.dtype, each.shape)
            for each in tensors.values()
        ]
        for name in (*(each.name for each in named), *objects):
            check_name(name)
        entries = tuple(ObjectEntry(name, value) for name, value in objects.items())
        tensor_list = encode_tensors_with(named, rows)
        manifest = self._request.manifest(self.save_id, world, files, (entries, ()), tensor_list)
        try:
            layout_of_manifest(manifest)
        except sw.FormatError as error:
            raise sw.LayoutError(
                f"commit of {path}: {error}. If elements are missing, or were saved "
                "twice: save every element by exactly one process, on all processes that hold "
                "shards"
            ) from error
        return manifest


def _leaf(name: str, tensor: Tensor, given: Mapping[str, Tensor]) -> TensorLeaf:
    check_name(name)
    if name not in given and is_shard(name, tensor):
        raise sw.StateError(
            f"{name}: a {type(tensor).__name__} cannot be part of a plain value: make it an item "
            "of the state; with DCP, save with flatten_state_dict=True"
        )
    if isinstance(tensor, np.ndarray):
        tensor = tensor_of_array(name, tensor)
    return replace(tensor_leaf(name, tensor), tie_key=None)


def _unite_tensors(parts: Iterable[SavedPart]) -> dict[str, TensorEntry]:
    """Return the tensors of all parts by name.

    Raises:
        MismatchError: parts have different dtypes or shapes of a tensor.
    """
    tensors: dict[str, TensorEntry] = {}
    problems = []
    for part in parts:
        for entry in part.tensors:
            first = tensors.setdefault(entry.name, entry)
            if (first.dtype, first.shape) != (entry.dtype, entry.shape):
                problems.append(
                    f"{entry.name}: {entry.dtype} {list(entry.shape)} of rank {part.rank}, "
                    f"{first.dtype} {list(first.shape)} before"
                )
    if problems:
        raise sw.MismatchError(
            "parts of a tensor have different dtypes or shapes; in all processes, pass the same "
            "dtype, and the global shape as sw.Shards(shape, …):",
            problems,
        )
    return tensors


def _check_ranks(parts: Iterable[SavedPart], world_size: int) -> None:
    """Check that each part has a rank of its own, below the number of processes."""
    seen: set[int] = set()
    for part in parts:
        if not 0 <= part.rank < world_size:
            raise sw.StateError(
                f"a part has rank {part.rank}, but begin() got world_size={world_size}: pass the "
                "number of processes to begin(), and ranks from 0 to write()"
            )
        if part.rank in seen:
            raise sw.StateError(
                f"two parts have rank {part.rank}: pass a different rank= to write() in each "
                "process, and each part once to commit()"
            )
        seen.add(part.rank)


def _refuse_other_places(parts: Iterable[SavedPart], path: str) -> None:
    path_of_rank = {part.rank: part.path for part in parts if part.path != path}
    if path_of_rank:
        raise sw.MismatchError(
            f"parts were not written to {path}, where this process commits. Pass the same path in "
            "all processes; if it contains a time, send it from the process that commits:",
            [f"rank {rank}: {path_of_rank[rank]}" for rank in sorted(path_of_rank)],
        )
