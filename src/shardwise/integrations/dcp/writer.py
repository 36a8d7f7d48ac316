"""`StorageWriter`: `torch.distributed.checkpoint.save` writes checkpoints of shardwise with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from math import prod
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwise.adapters.tensors import check_dtype, tensor_leaf, tensor_of_array
from shardwise.api import Place
from shardwise.engine.buffers import DEFAULT_STAGING_BYTES, Arena
from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import SaveRequest, refuse_if_full
from shardwise.engine.save import commit_save, lock_place
from shardwise.engine.tensors import check_memory
from shardwise.engine.write_file import FileSource, write_data_file
from shardwise.errors import StateError, StoreError
from shardwise.integrations.dcp.contents import (
    Written,
    WrittenPiece,
    WrittenValue,
    make_manifest,
)
from shardwise.layout import Box
from shardwise.manifest.data_file import encode_header_entries, lay_out_file
from shardwise.manifest.manifest import VERSION, FileEntry, encode_manifest
from shardwise.manifest.names import check_name, data_file, new_save_id
from shardwise.opening import refuse_as_destination
from shardwise.plan.tables import PieceTable
from shardwise.state.leaves import Fragment, LocalState, Shards
from shardwise.state.plain_values import encode
from shardwise.store import open_store


class StorageWriter(storage.StorageWriter):
    """Writes a checkpoint of shardwise for `torch.distributed.checkpoint`.

    `sw.load`, `sw.open` and the commands of shardwise read the checkpoint, and so does
    `StorageReader`. It is durable when `save` returns. If a save fails, nothing is published, and
    an existing checkpoint stays intact.

    Example:

        writer = StorageWriter("checkpoints/3")
        torch.distributed.checkpoint.save({"model": model.state_dict()}, storage_writer=writer)

    Args:
        path: a directory, which need not exist, a URL or a store. `checkpoint_id=` replaces it.
        overwrite: replace an existing checkpoint of shardwise, as DCP does. Otherwise, an existing
            checkpoint is an error.
        step: the training step of the state, an integer from 0.
        metrics: numbers to store with the checkpoint, for example a loss.
        allow_pickle: pickle values that have no plain form. Then `StorageReader` needs the option
            too.
        staging_bytes: bound on the host memory used beyond the state, in bytes; at least 1 MiB.

    Raises:
        StateError, ValueError: an option is invalid.
    """

    def __init__(
        self,
        path: Place,
        *,
        overwrite: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        allow_pickle: bool = False,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self.path = path
        self._options = SaveOptions.from_arguments(step, overwrite, False, metrics)
        self._allow_pickle = allow_pickle
        self._staging_bytes = staging_bytes
        self._save: _RunningSave | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be written to this path or URL."""
        try:
            open_store(checkpoint_id)
        except StoreError:
            return False
        return True

    @property
    def checkpoint_id(self) -> str:
        """The path or URL of the checkpoint."""
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save, to `checkpoint_id` if this is given."""
        self._end_save()
        if checkpoint_id:
            self.path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Open the place of the checkpoint.

        Raises:
            StateError: DCP's `use_collectives` is False.
            StoreError: the path or URL is invalid.
        """
        if not kwargs.get("use_collectives", True):
            raise StateError(
                "use_collectives=False: each rank would write a separate checkpoint, but a "
                "checkpoint of shardwise has one manifest for all ranks: leave out use_collectives="
            )
        self._end_save()
        request = SaveRequest(
            state=LocalState(),
            store=open_store(self.path),
            arena=Arena(self._staging_bytes),
            options=self._options,
        )
        cleanup = ExitStack()
        release = weakref.finalize(self, cleanup.close)  # also if the save fails on another rank
        self._save = _RunningSave(request, new_save_id(), cleanup, release)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lock the place of the checkpoint, and number the plans by rank.

        Raises:
            CheckpointExistsError: there is a foreign checkpoint, or the root of a run, or another
                checkpoint and `overwrite` is not set.
            StoreError, OSError: the place cannot be locked, or has too little room.
        """
        running = self._running_save()
        store = running.request.store
        refuse_as_destination(store)
        refuse_if_full(store, sum(_nbytes(item) for plan in plans for item in plan.items))
        running.save_id = lock_place(running.request, running.cleanup)
        running.world_size = len(plans)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to one file, and make the file durable.

        Raises:
            StateError: an item cannot be saved. The message names it.
            StoreError, OSError: the storage failed.
        """
        running = self._running_save()
        try:
            results = _write_items(plan, planner, running, allow_pickle=self._allow_pickle)
        except BaseException:
            self._end_save()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the manifest, which commits the checkpoint.

        Raises:
            StateError: a name is not allowed.
            LayoutError: the chunks of a tensor leave gaps or overlap.
            MismatchError: ranks saved to different places.
            CheckpointExistsError: another process saved here meanwhile.
            StoreError, OSError: the storage failed.
        """
        running = self._running_save()
        try:
            manifest = make_manifest(
                metadata,
                (result.storage_data for results_of_rank in results for result in results_of_rank),
                self._options,
                place=str(running.request.store),
                save_id=running.save_id,
                world_size=running.world_size,
                allow_pickle=self._allow_pickle,
            )
            encoded = encode_manifest(manifest)
            commit_save(running.request, running.save_id, encoded, manifest.files)
        finally:
            self._end_save()
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=manifest.save_id)

    def storage_meta(self) -> StorageMeta:
        """Return the path and the id of the save, for the planner."""
        return StorageMeta(self.checkpoint_id, save_id=self._save.save_id if self._save else None)

    def _running_save(self) -> _RunningSave:
        if self._save is None:
            raise StateError(
                f"{self.checkpoint_id}: no save is running; DCP calls set_up_storage_writer first"
            )
        return self._save

    def _end_save(self) -> None:
        """Release the lock of the running save, if there is one."""
        if self._save is not None:
            self._save.release()
            self._save = None


@dataclass(slots=True)
class _RunningSave:
    """A save between `set_up_storage_writer` and its end.

    Attributes:
        request: the place and the options.
        save_id: an id, which is part of the name of this rank's file. On the coordinator, the id
            of the save.
        cleanup: gets the lock of the save.
        release: closes `cleanup`.
        world_size: the number of ranks, on the coordinator.
    """

    request: SaveRequest
    save_id: str
    cleanup: ExitStack
    release: Callable[[], object]
    world_size: int = 1


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor to write: its DCP name, its dtype (torch's name), global shape, box and data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor


def _write_items(
    plan: SavePlan, planner: SavePlanner, running: _RunningSave, *, allow_pickle: bool
) -> list[WriteResult]:
    """Write the items of a plan, and return a result for each."""
    resolved: list[tuple[WriteItem, WrittenValue | None, list[_Part]]] = []
    for item in plan.items:
        check_name(item.index.fqn)
        if item.type == WriteItemType.BYTE_IO:
            value, inside = _resolve_value(item, planner, allow_pickle=allow_pickle)
            resolved.append((item, value, inside))
        else:
            resolved.append((item, None, _resolve_tensor(item, planner)))
    all_parts = [part for _, _, parts in resolved for part in parts]
    pieces = iter(_write_parts(all_parts, plan.storage_data, running))
    results = []
    for item, saved_value, parts in resolved:
        own = tuple(islice(pieces, len(parts)))
        written: Written = next(iter(own), None)
        if saved_value is not None:
            written = replace(saved_value, pieces=own)
        results.append(WriteResult(item.index, _nbytes(item), written))
    return results


def _resolve_tensor(item: WriteItem, planner: SavePlanner) -> list[_Part]:
    """Return the tensor of an item; nothing if it is empty."""
    name, described = item.index.fqn, item.tensor_data
    data = planner.resolve_data(item)
    if described is None or not isinstance(data, torch.Tensor):
        raise StateError(
            f"{name}: the planner resolved the item of a tensor to a {type(data).__name__}: "
            "correct its resolve_data"
        )
    box = Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes))
    if tuple(data.shape) != box.shape:
        raise StateError(
            f"{name}: the planner resolved the chunk {box} to a tensor of shape "
            f"{list(data.shape)}: correct its resolve_data"
        )
    dtype, leaf = check_dtype(name, data.dtype), tensor_leaf(name, data)
    shape = tuple(described.size)
    return [_Part(name, dtype, shape, box, fragment.data) for fragment in leaf.fragments]


def _resolve_value(
    item: WriteItem, planner: SavePlanner, *, allow_pickle: bool
) -> tuple[WrittenValue, list[_Part]]:
    """Return the value of an item, and the tensors inside it."""
    name = item.index.fqn
    try:
        data = planner.resolve_data(item)
    except (TypeError, AttributeError, PicklingError) as error:
        raise StateError(
            f"{name}: the planner cannot pickle this value: {error}: leave it out of the state, or "
            "give it state_dict() and load_state_dict()"
        ) from error
    if not isinstance(data, BytesIO):
        raise StateError(
            f"{name}: the planner resolved the item of a value to a {type(data).__name__}: "
            "correct its resolve_data"
        )
    data.seek(0)
    try:
        # The planner of this process has just pickled the value, so unpickling it is safe.
        value = torch.load(data, weights_only=False)
    except Exception as error:
        raise StateError(
            f"{name}: the planner resolved this value to bytes that torch.load cannot read: "
            f"{error}: let it resolve values as DefaultSavePlanner does"
        ) from error
    if isinstance(value, BytesIO):
        return WrittenValue(name, value), []
    tensors: dict[str, torch.Tensor | np.ndarray[Any, Any] | Shards] = {}
    encoded = encode(value, name, tensors.__setitem__, allow_pickle=allow_pickle)
    if not tensors:
        return WrittenValue(name, value), []
    parts, described = [], []
    for inside, tensor in tensors.items():
        if isinstance(tensor, Shards) or hasattr(tensor, "placements"):
            raise StateError(
                f"{inside}: a {type(tensor).__name__} cannot be part of the value {name}: save "
                "with flatten_state_dict=True, or make it an item of the state"
            )
        leaf = tensor_leaf(
            inside, tensor_of_array(inside, tensor) if isinstance(tensor, np.ndarray) else tensor
        )
        dtype = check_dtype(inside, leaf.dtype)
        described.append((inside, dtype, leaf.shape))
        parts += [_Part(inside, dtype, leaf.shape, each.box, each.data) for each in leaf.fragments]
    return WrittenValue(name, encoded=encoded, tensors=tuple(described)), parts


def _write_parts(parts: Sequence[_Part], rank: int, running: _RunningSave) -> list[WrittenPiece]:
    """Write the data file of this rank, and return the piece of each part, in the same order.

    Without parts, there is no file.
    """
    if not parts:
        return []
    # Wider types come first, so that every piece is aligned to its own type.
    order = sorted(range(len(parts)), key=lambda i: -parts[i].data.element_size())
    ordered = [parts[i] for i in order]
    for part in ordered:
        check_memory(part.name, part.data)
    start = np.cumsum([0, *(part.data.numel() * part.data.element_size() for part in ordered)])
    table = PieceTable(
        start.astype(np.int64),
        list(range(len(ordered))),
        [(0,) * len(part.box.shape) for part in ordered],
        [part.box.shape for part in ordered],
        [True] * len(ordered),
    )
    header = encode_header_entries(
        (part.name, part.dtype, part.shape, part.box) for part in ordered
    )
    metadata = {"shardwise": str(VERSION), "save_id": running.save_id, "rank": str(rank)}
    layout = lay_out_file(header, 0, metadata)
    source = FileSource.of(table, [Fragment(part.box, part.data) for part in ordered], layout)
    key = data_file(rank, running.save_id)
    store = running.request.store
    try:
        checksums_crc32 = write_data_file(store, key, source, running.request.arena)
    except BaseException:
        with suppress(OSError):
            store.delete(key)
        raise
    entry = FileEntry(
        key,
        rank,
        layout.size,
        layout.data_at,
        layout.objects_at,
        layout.checksums_at,
        checksums_crc32,
    )
    start_of = dict(zip(order, start.tolist(), strict=False))
    return [
        WrittenPiece(part.name, part.dtype, part.shape, part.box, start_of[i], entry, str(store))
        for i, part in enumerate(parts)
    ]


def _nbytes(item: WriteItem) -> int:
    """Return the tensor bytes of an item; 0 for a value."""
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
