"""The elements of a tensor that an index selects, read in batches of bounded size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from shardwise.layout import Box, Selected, batches, boxes_of_covers, cover
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry
from shardwise.state.leaves import Fragment, TensorLeaf

GAP = 64 << 10
"""The largest gap between two parts, in bytes, that is read to save a second read."""
LARGEST_BATCH = 64 << 20


def read_selected(
    entry: TensorEntry, along: Sequence[Selected], fill: Callable[[Sequence[TensorLeaf]], None]
) -> torch.Tensor:
    """Return the elements at the selected positions of each dimension, as a tensor on the CPU.

    Beyond the result, this takes at most `LARGEST_BATCH` bytes of host memory, or one row of the
    first dimension if that is more.

    Args:
        entry: the tensor.
        along: the selected positions of each dimension.
        fill: reads the data of leaves.
    """
    dtype: torch.dtype = getattr(torch, entry.dtype)
    out = torch.empty([len(each.positions) for each in along], dtype=dtype, device="cpu")
    if not out.numel():
        return out
    if not along:
        fill([TensorLeaf(entry.name, dtype, entry.shape, (Fragment(Box((), ()), out),))])
        return out
    itemsize = DTYPES[entry.dtype].itemsize
    gaps = [GAP // (itemsize * math.prod(entry.shape[dim + 1 :])) for dim in range(len(along))]
    inner = [cover(each.positions, gap) for each, gap in zip(along, gaps, strict=True)][1:]
    rows = along[0].positions
    most = max(1, LARGEST_BATCH // (itemsize * math.prod(each.length for each in inner)))
    for batch in batches(rows, gaps[0], most):
        covers = [cover(rows[batch], gaps[0]), *inner]
        lengths = [each.length for each in covers]
        exact = lengths == [*out[batch].shape]
        data = out[batch] if exact else torch.empty(lengths, dtype=dtype, device="cpu")
        fragments = [
            Fragment(there, data[here.slices()]) for there, here in boxes_of_covers(covers)
        ]
        fill([TensorLeaf(entry.name, dtype, entry.shape, tuple(fragments))])
        if not exact:
            for dim, each in enumerate(covers):
                data = data[(slice(None),) * dim + (each.within,)]
            out[batch] = data
    return out
