"""`StorageWriter`: `torch.distributed.checkpoint.save` writes checkpoints of shardwise with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from math import prod
from pickle import PicklingError
from typing import Any, Literal

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import shardwise as sw
from shardwise.integrations.dcp.names import name_state
from shardwise.integrations.dcp.partial_save import PartialSave, SavedPart
from shardwise.ports.binding import is_shard, tensor_leaf


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
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        allow_pickle: bool = False,
        staging_bytes: int = 64 << 20,
    ) -> None:
        self.path = path
        self._options: dict[str, Any] = {
            "overwrite": overwrite,
            "step": step,
            "metrics": metrics,
            "allow_pickle": allow_pickle,
            "staging_bytes": staging_bytes,
        }
        PartialSave(os.curdir, **self._options)  # checks the options
        self._save: PartialSave | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or URL. A save says whether it can be written."""
        return isinstance(checkpoint_id, (str, os.PathLike))

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
            raise sw.StateError(
                "use_collectives=False: each rank would write a separate checkpoint, but a "
                "checkpoint of shardwise has one manifest for all ranks: leave out use_collectives="
            )
        self._end_save()
        self._save = PartialSave(self.path, **self._options)

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
        nbytes = sum(_nbytes(item) for plan in plans for item in plan.items)
        self._running_save().begin(world_size=len(plans), nbytes=nbytes)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items to one file, and make the file durable.

        Raises:
            StateError: an item cannot be saved. The message names it.
            StoreError, OSError: the storage failed.
        """
        save = self._running_save()
        try:
            results = _write_items(plan, planner, save)
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
        save = self._running_save()
        written = [result for results_of_rank in results for result in results_of_rank]
        try:
            parts = [each.storage_data.part for each in written]
            tensors, values = _name_all(self.checkpoint_id, metadata, written)
            save.commit([each for each in parts if each is not None], values, tensors)
        finally:
            self._end_save()
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=save.save_id)

    def storage_meta(self) -> StorageMeta:
        """Return the path and the id of the save, for the planner."""
        return StorageMeta(self.checkpoint_id, save_id=self._save.save_id if self._save else None)

    def _running_save(self) -> PartialSave:
        if self._save is None:
            raise sw.StateError(
                f"{self.checkpoint_id}: no save is running; DCP calls set_up_storage_writer first"
            )
        return self._save

    def _end_save(self) -> None:
        """Release the lock of the running save, if there is one."""
        if self._save is not None:
            self._save.close()
            self._save = None


@dataclass(frozen=True, slots=True)
class Written:
    """The `storage_data` of a write result.

    Attributes:
        part: what the rank wrote; None for all but one of its items.
        kind: what the item is: a tensor; a plain value; a value with tensors inside; or an array.
        value: the plain value.
    """

    part: SavedPart | None
    kind: Literal["tensor", "value", "whole", "array"]
    value: object = None


def _write_items(plan: SavePlan, planner: SavePlanner, save: PartialSave) -> list[WriteResult]:
    """Write the items of a plan, and return a result for each."""
    chunks: dict[str, tuple[tuple[int, ...], list[tuple[sw.Box, torch.Tensor]]]] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    whole: dict[str, object] = {}
    written: list[Written] = []
    for item in plan.items:
        name = item.index.fqn
        if item.type != WriteItemType.BYTE_IO:
            shape, box, data = _resolve_tensor(item, planner)
            chunks.setdefault(name, (shape, []))[1].append((box, data))
            written.append(Written(None, "tensor"))
            continue
        value = _resolve_value(item, planner)
        if isinstance(value, np.ndarray):
            arrays[name] = value
            written.append(Written(None, "array"))
        elif _has_tensors(value):
            whole[name] = value
            written.append(Written(None, "whole"))
        else:
            written.append(Written(None, "value", value))
    shards = {
        name: sw.Shards(shape, parts[0][1].dtype, parts) for name, (shape, parts) in chunks.items()
    }
    part = save.write({**shards, **arrays}, whole, rank=plan.storage_data)
    if written:
        written[0] = replace(written[0], part=part)
    return [
        WriteResult(item.index, _nbytes(item), each)
        for item, each in zip(plan.items, written, strict=True)
    ]


def _name_all(
    path: str, metadata: Metadata, written: list[WriteResult]
) -> tuple[dict[str, str], dict[str, object]]:
    """Return the tensors and values that all ranks have written, as `name_state` does."""
    names: dict[str, list[str]] = {"tensor": [], "value": [], "whole": [], "array": []}
    for each in written:
        names[each.storage_data.kind].append(each.index.fqn)
    described = metadata.state_dict_metadata
    tensors = [name for name in described if isinstance(described[name], TensorStorageMetadata)]
    wrong = {*names["tensor"]} ^ {*tensors}
    if wrong:
        raise sw.StateError(
            f"{path}: {min(wrong)}: "
            + (
                "the planner's create_global_plan returned metadata with this tensor, which no "
                "rank wrote"
                if min(wrong) in tensors
                else "ranks wrote this tensor, which the metadata of the planner's "
                "create_global_plan lacks"
            )
            + ": correct create_global_plan"
        )
    paths = metadata.planner_data or {}
    values = {e.index.fqn: e.storage_data.value for e in written if e.storage_data.kind == "value"}
    return name_state(
        tensors,
        values,
        values_with_tensors=names["whole"],
        arrays=names["array"],
        paths={name: paths[name] for name in described if name in paths},
    )


def _resolve_tensor(
    item: WriteItem, planner: SavePlanner
) -> tuple[tuple[int, ...], sw.Box, torch.Tensor]:
    """Return the global shape of a tensor, the box of an item, and its data."""
    name, described = item.index.fqn, item.tensor_data
    data = planner.resolve_data(item)
    if described is None or not isinstance(data, torch.Tensor):
        raise sw.StateError(
            f"{name}: the planner resolved the item of a tensor to a {type(data).__name__}: "
            "correct its resolve_data"
        )
    box = sw.Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes))
    check_part(name, planner, tuple(described.size), box)
    if tuple(data.shape) != box.shape:
        raise sw.StateError(
            f"{name}: the planner resolved the chunk {box} to a tensor of shape "
            f"{list(data.shape)}: correct its resolve_data"
        )
    return tuple(described.size), box, data.detach().resolve_conj().resolve_neg()


def check_part(
    name: str, planner: object, shape: tuple[int, ...], box: sw.Box, *, within: bool = False
) -> None:
    """Check that a part of a global tensor is where the planner of DCP takes it to be.

    Planners do not know each order of shards, and those before PyTorch 2.14 do not know plain
    tensors that state their boxes.

    Args:
        name: the name of the tensor.
        planner: the planner. That of users may have no `state_dict`, and is not checked.
        shape: the global shape that the planner assumes.
        box: the box that the planner assumes, or a part of it.
        within: whether the box may be a part of a box of this rank.

    Raises:
        StateError: this rank holds other boxes.
    """
    tensor = getattr(planner, "state_dict", {}).get(name)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, ShardedTensor):
        return
    if not is_shard(name, tensor):
        return
    leaf = tensor_leaf(name, tensor)
    held = [each.box for each in leaf.fragments]
    if not box.size or (leaf.shape == shape and box in held):
        return
    if leaf.shape != shape or not within or not any(each.contains(box) for each in held):
        raise sw.StateError(
            f"{name}: the planner of DCP takes this rank's part of a tensor of shape "
            f"{[*leaf.shape]} for {box} of {[*shape]}, but it is "
            f"{', '.join(map(str, held)) or 'empty'}: use sw.save and sw.load, which know this "
            "sharding, or redistribute the tensor"
        )


def _resolve_value(item: WriteItem, planner: SavePlanner) -> object:
    """Return the value of an item."""
    name = item.index.fqn
    try:
        data = planner.resolve_data(item)
    except (TypeError, AttributeError, PicklingError) as error:
        raise sw.StateError(
            f"{name}: the planner cannot pickle this value: {error}: leave it out of the state, or "
            "give it state_dict() and load_state_dict()"
        ) from error
    if not isinstance(data, BytesIO):
        raise sw.StateError(
            f"{name}: the planner resolved the item of a value to a {type(data).__name__}: "
            "correct its resolve_data"
        )
    data.seek(0)
    try:
        # The planner of this process has just pickled the value, so unpickling it is safe.
        return torch.load(data, weights_only=False)
    except Exception as error:
        raise sw.StateError(
            f"{name}: the planner resolved this value to bytes that torch.load cannot read: "
            f"{error}: let it resolve values as DefaultSavePlanner does"
        ) from error


def _has_tensors(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensors, value))
    return isinstance(value, (torch.Tensor, np.ndarray, sw.Shards))


def _nbytes(item: WriteItem) -> int:
    """Return the tensor bytes of an item; 0 for a value."""
    if item.tensor_data is None:
        return 0
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
