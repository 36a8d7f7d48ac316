"""`StorageReader`: `torch.distributed.checkpoint.load` reads checkpoints of any format with it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any

import torch
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardwise.adapters import make_leaves_fillable
from shardwise.adapters.tensors import tensor_leaf
from shardwise.api import Index, Place, find_store
from shardwise.checkpoint import Checkpoint
from shardwise.engine.buffers import Arena
from shardwise.engine.group import SoloGroup
from shardwise.engine.load import read_leaves
from shardwise.errors import MismatchError, StateError, StoreError
from shardwise.formats.file_tree import FileTree
from shardwise.formats.options import OpenOptions
from shardwise.formats.readers.dcp.metadata import read_metadata as read_dcp_metadata
from shardwise.formats.readers.dcp.reader import FORMAT as DCP_FORMAT
from shardwise.formats.specification import Specification
from shardwise.integrations.dcp.names import (
    DcpNames,
    SavedValue,
    names_in_checkpoint,
    names_in_dcp_files,
)
from shardwise.layout import Box
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.names import MANIFEST
from shardwise.opening import open_any
from shardwise.plan.name_lookup import SavedNames
from shardwise.retention import Choice
from shardwise.saved_tensor import SavedTensor
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.state.plain_values import decode
from shardwise.store import Files, Store, open_store


class StorageReader(storage.StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint`, with any sharding.

    It reads the checkpoints that `StorageWriter` and `sw.save` write, and the formats of other
    frameworks that `sw.open` reads. Each rank reads only the blocks that it needs, and checks their
    checksums. If the dtype of a tensor differs from the saved dtype, its values are converted, as
    DCP does.

    Example:

        state = {"model": model.state_dict()}
        reader = StorageReader("checkpoints/3")
        torch.distributed.checkpoint.load(state, storage_reader=reader)
        model.load_state_dict(state["model"])

    Args:
        path: a directory, URL or store with a checkpoint, or the root of a run. `checkpoint_id=`
            replaces it.
        step, verify, spec, skip_unknown, format, index: as for `sw.open`.
        allow_pickle: unpickle values that were pickled. Use this only for files that you trust.
    """

    def __init__(
        self,
        path: Place,
        *,
        step: Choice = "newest",
        verify: bool = True,
        spec: Specification | None = None,
        skip_unknown: bool = False,
        format: str | None = None,  # noqa: A002 - as in `sw.open`
        index: Index | None = None,
        allow_pickle: bool = False,
    ) -> None:
        self.path = path
        self._step = step
        self._verify = verify
        self._options = OpenOptions(
            spec=spec, skip_unknown=skip_unknown, format=format, index=index
        )
        self._allow_pickle = allow_pickle
        self._load: _RunningLoad | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path or URL that a checkpoint can be read from."""
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
        """Begin another load, from `checkpoint_id` if this is given."""
        self._end_load()
        if checkpoint_id:
            self.path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Open the checkpoint, and return its tensors and values under the names of DCP.

        Each tensor has one chunk, whatever its sharding was when it was saved.

        Raises:
            CheckpointNotFoundError, FormatError: as for `sw.open`.
        """
        self._end_load()
        cleanup = ExitStack()
        release = weakref.finalize(self, cleanup.close)
        get_store = find_store(self.path, self._step, SoloGroup())

        def get_and_lock_store() -> Store:
            store = get_store()
            cleanup.enter_context(store.hold(MANIFEST, shared=True))
            return store

        store, layout = open_any(get_and_lock_store, SoloGroup(), options=self._options)
        names = names_in_checkpoint(layout, allow_pickle=self._allow_pickle)
        if layout.format == DCP_FORMAT and self._options.spec is None:
            metadata = read_dcp_metadata(FileTree(get_store()))
            names = names_in_dcp_files(names, metadata, layout)
        self._load = _RunningLoad(store, layout, names, release)
        entries = self._load.entries()
        described = {
            name: BytesStorageMetadata()
            if name in names.values
            else _describe(entries[names.tensors[name]])
            for name in names.paths
        }
        return Metadata(
            described,
            planner_data=dict(names.paths),
            storage_meta=StorageMeta(self.checkpoint_id, save_id=layout.save_id),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the checkpoint that this rank has opened."""
        if self._load is None:
            return plan
        identity = self._load.layout.save_id, str(self._load.store)
        return replace(plan, storage_data=identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Raises:
            MismatchError: ranks have opened different checkpoints.
        """
        opened = [plan.storage_data or ("", "") for plan in plans]
        if len({save_id for save_id, _ in opened}) > 1:
            raise MismatchError(
                "ranks do not load the same checkpoint. Pass the same checkpoint_id on all ranks; "
                "if another process saves there, load the directory of one step:",
                [f"rank {rank}: {place}" for rank, (_, place) in enumerate(opened)],
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a plan, and give its values to the planner.

        Raises:
            CorruptionError: bytes differ from the saved bytes. The state is partly written.
            MismatchError: a tensor of the plan does not fit the checkpoint.
            StateError: a value cannot be restored.
            StoreError, OSError: the storage failed.
        """
        if self._load is None:
            raise StateError(
                f"{self.checkpoint_id}: no load is running; DCP calls read_metadata first"
            )
        try:
            self._load.read(plan, planner, verify=self._verify, allow_pickle=self._allow_pickle)
        finally:
            self._end_load()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _end_load(self) -> None:
        """Release the lock of the checkpoint that is being read, if there is one."""
        if self._load is not None:
            self._load.release()
            self._load = None


@dataclass(frozen=True, slots=True)
class _RunningLoad:
    """A checkpoint between `read_metadata` and the end of the load.

    Attributes:
        store, layout: the checkpoint.
        names: its contents under the names of DCP.
        release: releases the lock of the checkpoint.
    """

    store: Files
    layout: Layout
    names: DcpNames
    release: Callable[[], object]

    def entries(self) -> dict[str, TensorEntry]:
        """Return the entries of all tensors, by the names in the checkpoint."""
        return {entry.name: entry for entry in self.layout.tensors}

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, *, verify: bool, allow_pickle: bool
    ) -> None:
        """Fill the tensors of a plan, and give its values to the planner."""
        tensor_items = [item for item in plan.items if item.type == LoadItemType.TENSOR]
        value_items = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item).detach() for item in tensor_items]
        self._fill(tensor_items, targets, verify=verify)
        for item, target in zip(tensor_items, targets, strict=True):
            planner.commit_tensor(item, target)
        wanted = [self._place_of(item) for item in value_items]
        names = dict.fromkeys(place.object_name for place in wanted)
        objects = self._read_objects(names, verify=verify, allow_pickle=allow_pickle)
        for item, place in zip(value_items, wanted, strict=True):
            data = BytesIO()
            torch.save(place.find(objects[place.object_name]), data)
            data.seek(0)
            planner.load_bytes(item, data)

    def _fill(
        self, items: Sequence[ReadItem], targets: Sequence[torch.Tensor], *, verify: bool
    ) -> None:
        entries = self.entries()
        leaves = [
            self._leaf(item, target, entries) for item, target in zip(items, targets, strict=True)
        ]
        arena = Arena.for_reading(self.store.traits.transfer)
        fillable = make_leaves_fillable(leaves)
        read_leaves(fillable, SavedNames(self.layout), self.store, arena, verify=verify)

    def _leaf(
        self, item: ReadItem, target: torch.Tensor, entries: Mapping[str, TensorEntry]
    ) -> TensorLeaf:
        """Return the box of a tensor that an item requests, with the memory to fill."""
        name = item.storage_index.fqn
        entry = entries.get(self.names.tensors.get(name, ""))
        box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        if entry is None or not Box.whole(entry.shape).contains(box):
            raise MismatchError(
                f"{self.store}: the planner requests what the checkpoint lacks:",
                [f"{name}{box}: " + ("no tensor" if entry is None else f"has {[*entry.shape]}")],
            )
        if tuple(target.shape) != box.shape:
            raise MismatchError(
                f"{self.store}: the planner resolved an item to another shape:",
                [f"{name}{box}: a tensor of shape {list(target.shape)}"],
            )
        leaf = tensor_leaf(entry.name, target)
        fragments = tuple(Fragment(box, fragment.data) for fragment in leaf.fragments)
        return replace(leaf, shape=entry.shape, fragments=fragments, tie_key=None)

    def _place_of(self, item: ReadItem) -> SavedValue:
        name = item.storage_index.fqn
        if name not in self.names.values:
            raise MismatchError(
                f"{self.store}: the planner requests what the checkpoint lacks:",
                [f"{name}: no plain value"],
            )
        return self.names.values[name]

    def _read_objects(
        self, names: Iterable[str], *, verify: bool, allow_pickle: bool
    ) -> dict[str, object]:
        """Return values of the checkpoint by name, with the tensors inside them.

        A value that is itself a NumPy array is stored as a tensor.
        """
        checkpoint = Checkpoint(self.store, self.layout, verify=verify)
        encoded = {entry.name: entry.value for entry in self.layout.objects}

        def read_tensor(name: str) -> torch.Tensor:
            saved: SavedTensor = checkpoint[name]
            return saved.tensor()

        return {
            name: decode(encoded[name], name, read_tensor, allow_pickle=allow_pickle)
            if name in encoded
            else read_tensor(name).numpy()
            for name in names
        }


def _describe(entry: TensorEntry) -> TensorStorageMetadata:
    size = torch.Size(entry.shape)
    whole = ChunkStorageMetadata(torch.Size([0] * len(entry.shape)), size)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])
