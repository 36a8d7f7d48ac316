"""The scales of a fragment: read and checked before a load, and kept or read again when needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch

from shardwise.kernel.boxes import Box
from shardwise.parts.quantized.schemes import BlockScaled
from shardwise.ports.binding import Fragment, TensorLeaf
from shardwise.ports.module_binding import view_for_numpy

_LARGEST_EXPONENT = 255
"""NaN as an exponent in e8m0."""
_HIGH = 16
"""The least rows of a block for which rows of blocks are multiplied one by one."""


class FragmentScales:
    """The scales of the blocks in a box of stored numbers.

    Args:
        scaled: the tensor.
        box: the box of the stored numbers.
        read: fills leaves by their names in the checkpoint.

    Attributes:
        nbytes: the size of these scales.
    """

    def __init__(
        self, scaled: BlockScaled, box: Box, read: Callable[[Sequence[TensorLeaf]], object]
    ) -> None:
        self._scaled, self._read = scaled, read
        entry = scaled.scales
        self._dtype: torch.dtype = getattr(torch, entry.dtype)
        self._low = tuple(o // b for o, b in zip(box.offset, scaled.block, strict=True))
        high = (-(-s // b) for s, b in zip(box.stop, scaled.block, strict=True))
        grid = tuple(h - lo for lo, h in zip(self._low, high, strict=True))
        self._grid = grid
        dims = len(entry.shape)
        is_single = Box.whole(entry.shape).size == 1
        self._box = Box.whole(entry.shape) if is_single else Box(self._low[:dims], grid[:dims])
        self.nbytes = self._box.size * self._dtype.itemsize
        self._values: torch.Tensor | None = None
        self._lock = threading.Lock()
        self._remaining = box.size

    def leaf(self) -> TensorLeaf:
        """Return new memory for the scales, for a read."""
        entry = self._scaled.scales
        self._values = torch.empty(self._box.shape, dtype=self._dtype, device="cpu")
        fragment = Fragment(self._box, self._values)
        return TensorLeaf(entry.name, self._dtype, entry.shape, (fragment,))

    def find_problem(self) -> str | None:
        """Return what is wrong with the scales that were read last; None if they are valid."""
        values = self._stored()
        name = self._scaled.scales.name
        if self._dtype in (torch.uint8, torch.float8_e8m0fnu):
            invalid = int((values.view(torch.uint8) == _LARGEST_EXPONENT).sum())
        else:
            invalid = int((~(torch.isfinite(values) & (values > 0))).sum())
        if not invalid:
            return None
        return f"{name}: {invalid} of {values.numel()} scales are NaN, infinite, zero or negative"

    def drop(self) -> None:
        """Forget the scales. They are read again when they are needed."""
        self._values = None

    def used(self, elements: int) -> None:
        """Forget the scales after all elements of the box have been computed."""
        with self._lock:
            self._remaining -= elements
            if self._remaining <= 0:
                self._values = None

    def _stored(self) -> torch.Tensor:
        with self._lock:
            if self._values is None:
                self._read([self.leaf()])
            values = self._values
        if values is None:
            raise RuntimeError(f"{self._scaled.scales.name}: the scales were not read")
        return values

    def select(self, box: Box) -> tuple[torch.Tensor, list[int]]:
        """Return the scales of a box in the stored tensor, as they are stored.

        Returns:
            The scales, whose dimensions are as long as those of the box, or 1 if all along it share
            a scale. If blocks are high, the scales have a row for each row of blocks instead. Then
            the list has the first row of each of them, and the number of rows; else, it is empty.
        """
        selected = view_for_numpy(self._stored()).numpy().reshape(self._grid)
        table = zip(box.offset, box.shape, self._scaled.block, self._low, strict=True)
        cuts: list[int] = []
        for dim, (offset, n, block, low) in enumerate(table):
            first, last = offset // block - low, (offset + n - 1) // block - low
            selected = selected[(slice(None),) * dim + (slice(first, last + 1),)]
            if block == 1 or first == last:
                continue
            if dim == len(box.shape) - 2 and block >= _HIGH:
                cuts = [0, *range(block - offset % block, n, block), n]
                continue
            counts = np.full(last + 1 - first, block)
            counts[0] -= offset % block
            counts[-1] -= -(offset + n) % block
            selected = selected.repeat(counts, axis=dim)
        return torch.from_numpy(np.array(selected)).view(self._dtype), cuts
