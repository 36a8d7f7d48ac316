"""The sources of an export: a checkpoint, an average of several, a model with a LoRA adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.convert.average import is_averaged, matches_any
from shardwise.convert.lora import BiasUpdate, Change, LowRankUpdate, Replacement
from shardwise.convert.plan import TensorPart
from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.load import fill_alone, plan_reads
from shardwise.engine.opened import Opened
from shardwise.errors import MismatchError
from shardwise.layout import Box, boxes_of
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.store.store import Buffer


class CheckpointSource:
    """Reads parts of tensors from a checkpoint.

    Args:
        opened: the checkpoint.
        arena: the buffers that bytes are read through.
        verify: whether to verify checksums.
    """

    def __init__(self, opened: Opened, arena: Arena, *, verify: bool = True) -> None:
        self.opened = opened
        self.saved = SavedNames(opened.manifest)
        self._arena = arena
        self._verify = verify

    def read(self, parts: list[tuple[TensorPart, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes differ from the bytes that were saved.
        """
        leaves = []
        unaligned: list[tuple[torch.Tensor, Buffer]] = []
        for part, buffer in parts:
            dtype = getattr(torch, part.dtype)
            if buffer.ctypes.data % dtype.itemsize:
                data = torch.empty(part.box.shape, dtype=dtype, device="cpu")
                unaligned.append((data, buffer))
            else:
                data = torch.from_numpy(buffer).view(dtype).view(part.box.shape)
            entry = self.saved.tensor(part.name)
            shape = part.box.shape if entry is None else entry.shape
            leaves.append(TensorLeaf(part.name, dtype, shape, (Fragment(part.box, data),)))
        planned = plan_reads(leaves, self.saved, self.opened, self._arena)
        fill_alone(planned, self.opened, self._arena, verify=self._verify)
        for data, buffer in unaligned:
            buffer[:] = data.reshape(-1).view(torch.uint8).numpy()


class AverageSource:
    """Computes the weighted average of several checkpoints.

    Floating-point and complex tensors are summed in double precision and rounded once. Other
    tensors must be equal in all checkpoints, or match `take_first`.

    Args:
        sources: the checkpoints by path.
        weights: one for each checkpoint; their sum is 1.
        take_first: shell patterns of tensors to take from the first checkpoint.
        max_bytes: host memory to use, in addition to the memory of the sources and of the writer.
    """

    def __init__(
        self,
        sources: Mapping[str, CheckpointSource],
        weights: Sequence[float],
        take_first: Sequence[str],
        max_bytes: int,
    ) -> None:
        self._sources = sources
        self._weights = weights
        self._take_first = take_first
        self._max_bytes = max_bytes

    def read(self, parts: list[tuple[TensorPart, Buffer]]) -> None:
        """Fill each buffer with its part of the average.

        Raises:
            CorruptionError: bytes differ from the bytes that were saved.
            MismatchError: a tensor that cannot be averaged differs between checkpoints.
        """
        first = next(iter(self._sources.values()))
        unchanged = []
        for part, buffer in parts:
            entry = first.saved.tensor(part.name)
            if entry is None or matches_any(part.name, self._take_first):
                unchanged.append((part, buffer))
            elif is_averaged(entry):
                self._average(part, buffer, entry)
            else:
                unchanged.append((part, buffer))
                self._check_equal(part)
        first.read(unchanged)

    def _average(self, part: TensorPart, buffer: Buffer, entry: TensorEntry) -> None:
        sum_dtype = "complex128" if getattr(torch, entry.dtype).is_complex else "float64"
        wide, dtype = getattr(torch, sum_dtype), getattr(torch, part.dtype)
        offset = 0
        for box in _contiguous_boxes(part, self._max_bytes // (2 * wide.itemsize)):
            nbytes = box.size * wide.itemsize
            term, total = (aligned_buffer(nbytes) for _ in range(2))
            average = torch.from_numpy(total).view(wide)
            for source, weight in zip(self._sources.values(), self._weights, strict=True):
                source.read([(TensorPart(part.name, box, sum_dtype), term)])
                average.add_(torch.from_numpy(term).view(wide), alpha=weight)
            rounded = average.to(dtype).view(torch.uint8).numpy()
            buffer[offset : offset + len(rounded)] = rounded
            offset += len(rounded)

    def _check_equal(self, part: TensorPart) -> None:
        """Raise an error if a tensor that cannot be averaged differs between checkpoints."""
        (first_path, first), *others = self._sources.items()
        entry = first.saved.tensor(part.name)
        dtype = part.dtype if entry is None else entry.dtype
        for box in _contiguous_boxes(part, self._max_bytes // (2 * getattr(torch, dtype).itemsize)):
            unconverted = TensorPart(part.name, box, dtype)
            wanted, found = (aligned_buffer(unconverted.size) for _ in range(2))
            first.read([(unconverted, wanted)])
            for path, source in others:
                source.read([(unconverted, found)])
                if wanted.tobytes() != found.tobytes():
                    raise MismatchError(
                        "tensors that are not floating-point must be equal in all checkpoints; "
                        "take_first= takes them from the first checkpoint, skip= leaves them out:",
                        [f"{part.name}: differs between {first_path} and {path}"],
                    )


class MergedSource:
    """Merges a LoRA adapter into a base model.

    Sums are computed in single precision, or in double precision if the base has it, and rounded
    once.

    Args:
        changes: for each changed tensor's name in the base, the change.
        max_bytes: host memory to use, in addition to the memory of the sources and of the writer.
    """

    def __init__(
        self,
        base: CheckpointSource,
        adapter: CheckpointSource,
        changes: Mapping[str, Change],
        max_bytes: int,
    ) -> None:
        self._base = base
        self._adapter = adapter
        self._changes = changes
        self._max_bytes = max_bytes
        self._last_factors: dict[str, tuple[TensorPart, torch.Tensor]] = {}

    def read(self, parts: list[tuple[TensorPart, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes differ from the bytes that were saved.
        """
        unchanged = []
        for part, buffer in parts:
            change = self._changes.get(part.name)
            if change is None:
                unchanged.append((part, buffer))
            elif isinstance(change, Replacement):
                self._adapter.read([(TensorPart(change.name, part.box, part.dtype), buffer)])
            else:
                self._merge_part(part, buffer, change)
        self._base.read(unchanged)

    def _merge_part(
        self, part: TensorPart, buffer: Buffer, change: LowRankUpdate | BiasUpdate
    ) -> None:
        entry = self._base.saved.tensor(part.name)
        sum_dtype = "float64" if entry is not None and entry.dtype == "float64" else "float32"
        dtype: torch.dtype = getattr(torch, part.dtype)
        lora_rank = change.rank if isinstance(change, LowRankUpdate) else 1
        itemsize = getattr(torch, sum_dtype).itemsize
        out = torch.from_numpy(buffer)
        if buffer.ctypes.data % dtype.itemsize:
            out = torch.empty(part.size, dtype=torch.uint8, device="cpu")
        merged = out.view(dtype).view(part.box.shape)
        replacement = change.replacement if isinstance(change, LowRankUpdate) else None
        source, name = (
            (self._base, part.name) if replacement is None else (self._adapter, replacement)
        )
        for tile in _cut_into_tiles(part.box.shape, lora_rank, self._max_bytes // itemsize):
            offset = tuple(a + b for a, b in zip(part.box.offset, tile.offset, strict=True))
            box = Box(offset, tile.shape)
            value = _read_tensor(source, name, box, sum_dtype)
            value += self._compute_update(box, change, sum_dtype)
            merged[tile.slices()] = value.to(dtype)
        if out.data_ptr() != buffer.ctypes.data:
            buffer[:] = out.numpy()

    def _compute_update(
        self, box: Box, change: LowRankUpdate | BiasUpdate, sum_dtype: str
    ) -> torch.Tensor:
        """Compute what the adapter adds to a box of the base's tensor."""
        if isinstance(change, BiasUpdate):
            return _read_tensor(self._adapter, change.name, box, sum_dtype) * change.scaling
        (row, column), (rows, columns) = box.offset, box.shape
        if change.transposed:
            row, column, rows, columns = column, row, columns, rows
        box_of_a = Box((0, column), (change.rank, columns))
        box_of_b = Box((row, 0), (rows, change.rank))
        a = self._read_factor("a", TensorPart(change.a, box_of_a, sum_dtype))
        b = self._read_factor("b", TensorPart(change.b, box_of_b, sum_dtype))
        product = (b @ a) * change.scaling
        return product.T if change.transposed else product

    def _read_factor(self, side: str, part: TensorPart) -> torch.Tensor:
        """Read a part of a LoRA factor; keep it, because neighbouring tiles use the same part."""
        last = self._last_factors.pop(side, None)
        if last is None or last[0] != part:
            last = None  # free the old part before the new one is read
            last = part, _read_tensor(self._adapter, part.name, part.box, part.dtype)
        self._last_factors[side] = last
        return last[1]


def _contiguous_boxes(part: TensorPart, max_elements: int) -> list[Box]:
    """Cut a part into boxes of at most `max_elements` elements that are contiguous in memory."""
    return [
        Box(tuple(a + b for a, b in zip(part.box.offset, box.offset, strict=True)), box.shape)
        for box in boxes_of(part.box.shape, max(1, max_elements))
    ]


def _read_tensor(source: CheckpointSource, name: str, box: Box, dtype_name: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, dtype_name)
    buffer = aligned_buffer(box.size * dtype.itemsize)
    source.read([(TensorPart(name, box, dtype_name), buffer)])
    return torch.from_numpy(buffer).view(dtype).view(box.shape)


def _cut_into_tiles(shape: Sequence[int], lora_rank: int, max_elements: int) -> Iterator[Box]:
    """Cut a vector or matrix into tiles.

    A tile and its factors have at most `max_elements` elements together.
    """
    if len(shape) == 1:
        step = max(1, max_elements // 4)
        for start in range(0, shape[0], step):
            yield Box((start,), (min(step, shape[0] - start),))
        return
    rows, columns = shape
    width = min(columns, max(1, max_elements // (4 * lora_rank)))
    height = max(1, (max_elements - lora_rank * width) // (lora_rank + 4 * width))
    for left in range(0, columns, width):
        for top in range(0, rows, height):
            yield Box((top, left), (min(height, rows - top), min(width, columns - left)))
