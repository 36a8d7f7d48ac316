"""A checkpoint opened for reading by name."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import SupportsIndex

import numpy as np
import torch

from shardwise.engine.alike import unlike_replicas
from shardwise.engine.arena import Arena
from shardwise.engine.load import fill, plan_filling
from shardwise.engine.opened import Opened
from shardwise.engine.verify import verify_files, verify_sums
from shardwise.errors import CorruptionError, MismatchError, StateError
from shardwise.events import Recorder, Sink
from shardwise.layout import Box
from shardwise.manifest.manifest import Manifest, TensorEntry
from shardwise.plan.saved import SavedState
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.state.objects import decode

Index = SupportsIndex | slice | tuple[SupportsIndex | slice, ...]


class SavedTensor:
    """A tensor in a checkpoint. Indexing it with integers and slices reads what they select."""

    def __init__(self, checkpoint: Checkpoint, entry: TensorEntry) -> None:
        self._checkpoint = checkpoint
        self.name = entry.name
        self.shape = torch.Size(entry.shape)
        self.dtype: torch.dtype = getattr(torch, entry.dtype)

    def __repr__(self) -> str:
        return f"SavedTensor({self.name!r}, {self.dtype}, {list(self.shape)})"

    def __getitem__(self, index: Index | type(...)) -> torch.Tensor:  # type: ignore[valid-type]
        """Read a part: integers, and slices of step 1; `[...]` or `[:]` reads all of it.

        Raises:
            IndexError: the index does not fit the shape.
            CorruptionError: bytes are not those that were saved.
        """
        if index is Ellipsis:
            index = ()
        box, squeezed = _box_of(index, tuple(self.shape))
        out = torch.empty(box.shape, dtype=self.dtype, device="cpu")
        if box.size:
            self._checkpoint.read_into(self.name, box, out)
        return out[squeezed]


class Checkpoint(Mapping[str, object]):
    """The names of a checkpoint, to tensors (`SavedTensor`, read when indexed) and plain values.

    Attributes:
        manifest: all that is known of it.
        verified: whether checksums are checked on reading.
    """

    def __init__(self, opened: Opened, *, verify: bool) -> None:
        self._opened = opened
        self._saved = SavedState(opened.manifest)
        self._arena = Arena()
        self.manifest: Manifest = opened.manifest
        self.verified = verify

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path} step={self.step} names={len(self)}>"

    @property
    def path(self) -> str:
        """Where it is."""
        return str(self._opened.store)

    @property
    def step(self) -> int | None:
        """The step that it belongs to."""
        return self.manifest.step

    @property
    def world_size(self) -> int:
        """How many ranks saved it."""
        return self.manifest.world_size

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a foreign checkpoint has that has no name here, and why; one line each."""
        return self._opened.left_out

    def __getitem__(self, name: str) -> object:
        entry = self._saved.tensor(name)
        if entry is not None:
            return SavedTensor(self, entry)
        if not self._saved.has_object(name):
            raise KeyError(name)
        return decode(self._saved.object(name), name, self._whole)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._saved.all_names() if name not in self.manifest.per_rank)

    def __len__(self) -> int:
        return len(self.manifest.tensors) + len(self.manifest.objects)

    def tensors(self) -> dict[str, SavedTensor]:
        """All tensors by name."""
        return {entry.name: SavedTensor(self, entry) for entry in self.manifest.tensors}

    def boxes(self, name: str) -> list[tuple[Box, int]]:
        """The boxes in which a tensor is stored, and the rank that wrote each.

        Raises:
            KeyError: there is no tensor of this name.
        """
        entry = self._saved.tensor(name)
        if entry is None:
            raise KeyError(name)
        ndim = len(entry.shape)
        pieces = self._opened.pieces
        rows = np.flatnonzero(pieces.tensor == self._saved.stored_index(name)).tolist()
        return [
            (
                Box(
                    tuple(pieces.offset[row, :ndim].tolist()),
                    tuple(pieces.shape[row, :ndim].tolist()),
                ),
                self.manifest.files[int(pieces.file[row])].rank,
            )
            for row in rows
        ]

    def read_into(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Fill `out`, of the box's shape and the tensor's dtype, from a box of a tensor.

        Raises:
            KeyError: there is no tensor of this name.
            StateError: the box is not inside the tensor, or `out` is not of its shape and dtype.
            CorruptionError: bytes are not those that were saved.
        """
        entry = self._saved.tensor(name)
        if entry is None:
            raise KeyError(name)
        whole = Box.whole(entry.shape)
        if len(box.shape) != len(entry.shape) or not whole.contains(box):
            raise StateError(f"{name}: {box} is not inside a tensor of shape {list(entry.shape)}")
        if tuple(out.shape) != box.shape or str(out.dtype) != f"torch.{entry.dtype}":
            raise StateError(
                f"{name}: {box} of it is {entry.dtype} of shape {list(box.shape)}, which "
                f"{out.dtype} of shape {list(out.shape)} is not"
            )
        leaf = TensorLeaf(name, out.dtype, entry.shape, (Fragment(box, out),))
        filling = plan_filling([leaf], self._saved, self._opened, self._arena)
        fill(filling, self._opened, self._arena, verify=self.verified)

    def verify(self, on_event: Sink | None = None) -> int:
        """Check every byte of every file against its checksum.

        Of a foreign checkpoint only zip archives have any, as `torch.save` and DCP write them;
        and where it has several replicas of something, they are compared.

        Args:
            on_event: told of each file as it is done.

        Returns:
            The bytes that were checked; 0 if there is nothing to check them by.

        Raises:
            CorruptionError: a file is missing or cut off, or bytes are not those that were saved.
            MismatchError: replicas differ; names all tensors of which some do.
        """
        if not self._opened.beyond:
            return verify_files(self._opened, self._arena, Recorder(on_event))
        recorder = Recorder(on_event)
        total = 0
        for checked, altered in verify_sums(self._opened, self._arena, recorder):
            if altered:
                raise CorruptionError(f"{self.path}: {altered[0]}")
            total += checked
        compared, unlike = unlike_replicas(self._opened, self._arena, recorder)
        if unlike:
            raise MismatchError(f"{self.path}: replicas differ, of:", unlike)
        return total + compared

    def _whole(self, name: str) -> torch.Tensor:
        value = self[name]
        if not isinstance(value, SavedTensor):
            raise StateError(f"{name}: a plain value names it as a tensor, which it is not")
        return value[...]


def _box_of(index: object, shape: tuple[int, ...]) -> tuple[Box, tuple[int | slice, ...]]:
    """The box that an index selects, and the index that drops its integers' dimensions."""
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) > len(shape):
        raise IndexError(f"{len(parts)} indices for a tensor of shape {list(shape)}")
    offset: list[int] = []
    extent: list[int] = []
    squeezed: list[int | slice] = []
    for dim, n in enumerate(shape):
        part = parts[dim] if dim < len(parts) else slice(None)
        if isinstance(part, slice):
            start, stop, step = part.indices(n)
            if step != 1:
                raise IndexError(f"step {step}: only slices of step 1 are read")
            offset.append(start)
            extent.append(max(0, stop - start))
            squeezed.append(slice(None))
        else:
            at = operator.index(part)
            if not -n <= at < n:
                raise IndexError(f"index {at} in dimension {dim} of shape {list(shape)}")
            offset.append(at % n)
            extent.append(1)
            squeezed.append(0)
    return Box(tuple(offset), tuple(extent)), tuple(squeezed)
