"""Fill tensors from a checkpoint: plan the reads of this rank, and read alone."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import torch

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import IntArray, padded_rows
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.data_reader import DataReader
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.tensors import (
    SpanCopier,
    TensorMemory,
    check_memory,
    memory_of,
    split_ties,
)
from shardwise.kernel.errors import CorruptionError, MismatchError
from shardwise.kernel.events import OperationRecord, format_bytes, format_count
from shardwise.kernel.manifest.checksums import BLOCK
from shardwise.kernel.manifest.layout import Layout, StoredFiles
from shardwise.kernel.plan.load import Ranges, Transfers, plan_load
from shardwise.kernel.state.local_state import Fragment, TensorLeaf, same_bytes
from shardwise.kernel.state.name_lookup import SavedNames
from shardwise.kernel.store import Files
from shardwise.kernel.store.store import Buffer

_COMPARED_BYTES = 1 << 26
"""How much of two tensors is read at a time to compare them."""
Readers = dict[int, DataReader]
"""The readers of files, by the index of the file in the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The result of a load. Bytes and seconds are of this rank.

    Attributes:
        path: the path of the checkpoint.
        step: the step of the checkpoint, if it has one.
        bytes_needed: the size of the elements that this rank needed.
        bytes_read: bytes that this rank read from storage, in whole checksum blocks. If ranks share
            their reads, other ranks use these bytes too.
        bytes_received: bytes that this rank received from other nodes, for the ranks of its node.
        files: the number of data files that this rank read from.
        missing: names of the state that the checkpoint lacks; unchanged (`strict=False` only).
        unexpected: names of the checkpoint that no rank asked for (`strict=False` only).
        optimizers: the names of the optimizers whose state was loaded on this rank.
        dequantized: names of tensors whose values this rank computed with their scales
            (`dequantize=True` only).
        seconds: the time of each stage (open, match, plan, read, restore), and `total`.
        record: the events of the stages, and the waits for other ranks.
    """

    path: str
    step: int | None
    bytes_needed: int
    bytes_read: int
    bytes_received: int
    files: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    optimizers: tuple[str, ...]
    dequantized: tuple[str, ...] = ()
    seconds: dict[str, float]
    record: OperationRecord = field(default_factory=OperationRecord)

    def __repr__(self) -> str:
        return (
            f"<LoadReport of step {self.step}: {format_bytes(self.bytes_needed)} "
            f"in {self.seconds['total']:.2f} s>"
        )

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        missing = f"; {format_count(len(self.missing), 'name')} missing" if self.missing else ""
        unexpected = ""
        if self.unexpected:
            unexpected = f"; {format_count(len(self.unexpected), 'name')} left over"
        if self.dequantized:
            missing = f"; {format_count(len(self.dequantized), 'tensor')} dequantized{missing}"
        read = format_bytes(self.bytes_read)
        if self.bytes_received:
            read += f" and received {format_bytes(self.bytes_received)} from other nodes"
        return (
            f"loaded{step} from {self.path}: {format_bytes(self.bytes_needed)}, for which this "
            f"rank read {read}, in {self.seconds['total']:.2f} s{missing}{unexpected}"
        )


@dataclass(slots=True, kw_only=True)
class RankReads:
    """What one rank of a load reads, and the tensors that it fills.

    Attributes:
        store, layout: the files of the checkpoint, and its layout.
        arena: the buffers to read through; bounds the memory.
        verify: whether to verify checksums.
        largest_reads: the longest read of each file that fits into the arena, in bytes, `(files,)`.
        spans: the byte ranges to read; each fits into one read.
        transfers: the boxes to copy from them.
        leaves: the tensors to fill.
        memory: the memory of each fragment of `leaves`, which `transfers` refers to.
        bytes_needed: the size of the wanted elements.
        bytes_read, bytes_received: bytes that this rank has read from storage, and that it has
            received from other nodes. Who reads adds to them.
    """

    store: Files
    layout: Layout
    arena: Arena
    verify: bool
    largest_reads: IntArray
    spans: Ranges
    transfers: Transfers
    leaves: Sequence[TensorLeaf]
    memory: Sequence[TensorMemory]
    bytes_needed: int
    bytes_read: int = 0
    bytes_received: int = 0

    @property
    def are_mapped(self) -> bool:
        """Whether all files of the spans are mapped into this rank's memory."""
        mapped, files = self.store.traits.mapped, np.unique(self.spans.file).tolist()
        return mapped is not None and all(self.layout.files[i].name in mapped for i in files)

    def open_readers(self, files: IntArray, cleanup: ExitStack) -> Readers:
        """Open the readers of some files, which are given by their indices in the layout.

        Raises:
            CorruptionError: as for `DataReader`.
        """
        readers: Readers = {}
        for index in np.unique(files).tolist():
            readers[index] = DataReader(self.store, self.layout.files[index], verify=self.verify)
            cleanup.callback(readers[index].close)
        return readers

    def copier(self, spans: Ranges) -> SpanCopier:
        """Return the object that copies boxes from these spans to the fragments."""
        strides = self.layout.runs.stride
        return SpanCopier(self.transfers, spans, strides, self.leaves, self.memory)

    def fill_alone(self, ranks_on_node: int = 1) -> None:
        """Read and fill the tensors on this rank alone.

        Args:
            ranks_on_node: the number of ranks of this node that read at the same time.

        Raises:
            CorruptionError: bytes differ from the saved bytes; the target is partly written.
        """
        spans, arena = self.spans, self.arena
        copier = self.copier(spans)
        threads = arena.threads_of(ranks_on_node)
        if self.are_mapped:  # then only the processors limit the speed
            threads = min(threads, max(1, (os.cpu_count() or 1) // ranks_on_node))
        remaining = iter(range(len(spans)))  # shared by all threads
        failed = threading.Event()

        def work() -> None:
            try:
                with arena.buffer() as buffer:
                    for span in remaining:
                        if failed.is_set():
                            return
                        target = copier.target(span)
                        data = read_span(
                            spans, span, readers, copier, buffer, in_place=True, target=target
                        )
                        if data is not target:
                            copier.copy(span, data)
            except BaseException:
                failed.set()
                raise

        with ExitStack() as cleanup:
            readers = self.open_readers(spans.file, cleanup)
            run_in_threads(work, min(threads, len(spans)))
        self.finish()
        self.bytes_read += spans.nbytes

    def finish(self) -> None:
        """Move values to their final memory, after all fragments are filled."""
        for leaf in self.leaves:
            if leaf.after_load is not None:
                leaf.after_load()


class ReadAlone:
    """Each rank reads all that it needs."""

    def agree(self, reads: RankReads, group: Group, cleanup: ExitStack) -> Callable[[], None]:
        """Agree on nothing: the returned function reads on this rank alone."""
        return reads.fill_alone


def plan_reads(
    leaves: Sequence[TensorLeaf], saved: SavedNames, store: Files, arena: Arena, *, verify: bool
) -> RankReads:
    """Plan the reads that fill some tensors.

    If one memory has several names, the first name fills the memory. If the checkpoint stores
    another tensor under a second name, both are read and compared first.

    Args:
        leaves: the tensors.
        saved: the contents of the checkpoint.
        store: the files of the checkpoint.
        arena: the buffers to read through.
        verify: whether to verify checksums.

    Raises:
        StateError: a tensor has no memory.
        MismatchError: names of one memory have different values in the checkpoint.
    """
    _, ties = split_ties(leaves)
    first_names = dict(ties)
    indices, listed, problems = [], [], []
    for leaf in leaves:
        index, first = saved.stored_index(leaf.name), first_names.get(leaf.name)
        if first is None:
            indices.append(index)
            listed.append(leaf)
        elif index != saved.stored_index(first):
            stored = (index, saved.stored_index(first))
            if not _are_stored_equal(leaf, stored, saved.layout, store, arena, verify=verify):
                problems.append(f"{first} and {leaf.name}")
    if problems:
        raise MismatchError(
            "names that share memory in the target have different values in the checkpoint; "
            "nothing was written. Load into tensors that are not tied, or leave out one name with "
            "skip=:",
            problems,
        )
    return _plan_reads(indices, listed, saved.layout, store, arena, verify=verify)


def _plan_reads(
    indices: Sequence[int],
    leaves: Sequence[TensorLeaf],
    layout: Layout,
    store: Files,
    arena: Arena,
    *,
    verify: bool,
) -> RankReads:
    """Plan the reads that fill tensors.

    Args:
        indices: the index of each of `leaves` in `Layout.runs.tensor`.
    """
    if layout.terms:
        indices, leaves = _split_means(indices, leaves, layout)
    dims = layout.runs.offset.shape[1]
    memory: list[TensorMemory] = []
    bytes_needed = 0
    tensor: list[int] = []
    offsets: list[tuple[int, ...]] = []
    shapes: list[tuple[int, ...]] = []
    for index, leaf in zip(indices, leaves, strict=True):
        dtype = getattr(torch, layout.tensors[int(layout.tensor_of[index])].dtype)
        for fragment in leaf.fragments:
            box = fragment.box
            check_memory(leaf.name, fragment.data)
            memory.append(fragment.memory or memory_of(fragment.data, dtype))
            bytes_needed += box.size * memory[-1].itemsize
            tensor.append(index)
            offsets.append(box.offset[:dims])  # only empty tensors have more dimensions
            shapes.append(box.shape[:dims])
    offset, shape = padded_rows(offsets, dims, 0), padded_rows(shapes, dims, 1)
    largest = _largest_reads(store, layout, arena)
    transfers, spans = plan_load(
        layout,
        (np.array(tensor, np.int64), offset, shape),
        largest_read=largest,
        largest_gap=arena.traits.largest_gap,
    )
    return RankReads(
        store=store,
        layout=layout,
        arena=arena,
        verify=verify,
        largest_reads=largest,
        spans=spans,
        transfers=transfers,
        leaves=leaves,
        memory=memory,
        bytes_needed=bytes_needed,
    )


def _largest_reads(store: Files, layout: Layout, arena: Arena) -> IntArray:
    """Return the longest read of each file that fits into an arena, in bytes, `(files,)`.

    Each read of a file on another node is one request, so these reads fill a whole buffer.
    """
    mapped = store.traits.mapped
    if isinstance(layout.files, StoredFiles):
        size = arena.read_size if mapped is None else arena.buffer_size
        found = np.full(len(layout.files), size, np.int64)
        indices = map(layout.files.table.index_of, mapped or ())
        found[[index for index in indices if index is not None]] = arena.read_size
        return found
    sizes = []
    for file in layout.files:
        is_on_other_node = mapped is not None and file.name not in mapped
        size = arena.buffer_size if is_on_other_node else arena.read_size
        if file.entry is None:
            size -= BLOCK  # for the bytes past the end; see `DataReader`
        sizes.append(size)
    return np.array(sizes, np.int64)


def _are_stored_equal(
    leaf: TensorLeaf,
    stored: tuple[int, int],
    layout: Layout,
    store: Files,
    arena: Arena,
    *,
    verify: bool,
) -> bool:
    """Return whether two stored tensors are equal in this rank's fragments of a leaf.

    Args:
        stored: the indices of the two tensors in `Layout.runs.tensor`.
    """
    for box in (fragment.box for fragment in leaf.fragments):
        row_bytes = leaf.dtype.itemsize * box.size // max(1, box.shape[0] if box.shape else 1)
        step = max(1, _COMPARED_BYTES // max(1, row_bytes))
        for first in range(0, box.shape[0] if box.shape else 1, step):
            part = box
            if box.shape:
                rows = min(step, box.shape[0] - first)
                offset = (box.offset[0] + first, *box.offset[1:])
                part = Box(offset, (rows, *box.shape[1:]))
            pair = read_boxes([(i, part) for i in stored], store, layout, arena, verify=verify)
            if not same_bytes(*(each.to(leaf.dtype) for each in pair)):
                return False
    return True


def _split_means(
    indices: Sequence[int], leaves: Sequence[TensorLeaf], layout: Layout
) -> tuple[list[int], list[TensorLeaf]]:
    """Replace each tensor that is the mean of several terms by leaves that read the terms."""
    stored: list[int] = []
    split: list[TensorLeaf] = []
    for index, leaf in zip(indices, leaves, strict=True):
        terms = layout.terms_of.get(index)
        stored += [index] if terms is None else terms
        split += [leaf] if terms is None else _leaves_of_terms(leaf, terms, layout)
    return stored, split


def _leaves_of_terms(leaf: TensorLeaf, indices: Sequence[int], layout: Layout) -> list[TensorLeaf]:
    """Return a temporary leaf for each term of a mean.

    `finish` runs after all leaves are filled, so the last one computes the mean.
    """
    dtype = getattr(torch, layout.tensors[int(layout.tensor_of[indices[0]])].dtype)
    terms = [
        tuple(
            Fragment(f.box, torch.empty(f.box.shape, dtype=dtype, device="cpu"))
            for f in leaf.fragments
        )
        for _ in indices
    ]

    def finish() -> None:
        for i, fragment in enumerate(leaf.fragments):
            stacked = torch.stack([term[i].data for term in terms])
            fragment.data.copy_(stacked.mean(dim=0, dtype=torch.float64))
        if leaf.after_load is not None:
            leaf.after_load()

    hooks = [None] * (len(indices) - 1) + [finish]
    return [
        TensorLeaf(leaf.name, dtype, leaf.shape, fragments, None, hook)
        for fragments, hook in zip(terms, hooks, strict=True)
    ]


def read_boxes(
    boxes: Sequence[tuple[int, Box]], store: Files, layout: Layout, arena: Arena, *, verify: bool
) -> list[torch.Tensor]:
    """Read boxes of tensors into new CPU tensors, all together.

    Args:
        boxes: the index of each tensor in `Layout.runs.tensor`, and the box.

    Raises:
        CorruptionError: bytes differ from the saved bytes.
    """
    out, indices, leaves = [], [], []
    for index, box in boxes:
        entry = layout.tensors[int(layout.tensor_of[index])]
        data = torch.empty(box.shape, dtype=getattr(torch, entry.dtype), device="cpu")
        leaf = TensorLeaf(entry.name, data.dtype, entry.shape, (Fragment(box, data),))
        out.append(data)
        indices.append(index)
        leaves.append(leaf)
    _plan_reads(indices, leaves, layout, store, arena, verify=verify).fill_alone()
    return out


def run_in_threads(
    work: Callable[[], None], threads: int, further: Callable[[], None] | None = None
) -> None:
    """Run `work` in `threads` threads, one of them the calling thread; and `further` in another
    thread."""
    jobs = [work] * (threads - 1) + ([further] if further is not None else [])
    with ThreadPoolExecutor(max(1, len(jobs)), "shardwise-read") as pool:
        others = list(map(pool.submit, jobs))
        work()
        for future in others:
            future.result()


def read_span(
    spans: Ranges,
    span: int,
    readers: Readers,
    copier: SpanCopier,
    buffer: Buffer,
    *,
    in_place: bool = False,
    target: Buffer | None = None,
) -> Buffer:
    """Read and verify a span.

    Args:
        buffer: memory for the bytes.
        in_place, target: as for `DataReader.read`.

    Raises:
        CorruptionError: bytes differ from the saved bytes. The error names the tensors.
    """
    low, high = int(spans.low[span]), int(spans.high[span])
    try:
        return readers[int(spans.file[span])].read(
            low, high, buffer, in_place=in_place, target=target
        )
    except CorruptionError as error:
        names = copier.tensor_names(span)
        raise CorruptionError(
            f"{error}; these bytes belong to {names}" if names else str(error)
        ) from error
