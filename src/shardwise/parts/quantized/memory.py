"""The memory of a fragment that a load fills with stored numbers times their scales.

A load hands it boxes of the stored numbers, as it hands them to plain memory. They are computed in
small parts, so the memory for this does not grow with the tensor.
"""

from __future__ import annotations

from operator import add

import numpy as np
import torch

from shardwise.kernel.boxes import Box, split_into_boxes
from shardwise.kernel.engine.tensors import TensorMemory, memory_of
from shardwise.parts.quantized.numbers import AT_ONCE, Array, Scratch, scale_fp8, unpack_fp4
from shardwise.parts.quantized.scales import FragmentScales
from shardwise.parts.quantized.schemes import MXFP4_BYTES, BlockScaled
from shardwise.ports.binding import Fragment
from shardwise.ports.module_binding import view_for_numpy


def stored_box(scaled: BlockScaled, box: Box) -> Box:
    """Return the box of the stored numbers that a box of the tensor needs."""
    if not scaled.is_mxfp4:
        return box
    (expert, column, row), (experts, columns, rows) = box.offset, box.shape
    numbers = 2 * MXFP4_BYTES
    first, last = column // numbers, -(-(column + columns) // numbers)
    return Box((expert, row, first, 0), (experts, rows, last - first, MXFP4_BYTES))


class ScaledMemory:
    """Memory with the methods of `TensorMemory` that a load needs.

    Args:
        scaled: the tensor.
        fragment: the box of the tensor to fill, and its memory.
        scales: the scales of its blocks.
        scratch: memory of the threads for conversions.
    """

    device: torch.device | None = None
    dtype = np.dtype(np.uint8)
    itemsize = 1

    def __init__(
        self, scaled: BlockScaled, fragment: Fragment, scales: FragmentScales, scratch: Scratch
    ) -> None:
        self._scaled, self._scales, self._scratch = scaled, scales, scratch
        self._box, self._stored = fragment.box, stored_box(scaled, fragment.box)
        self._data = fragment.data.detach()
        self._memory: TensorMemory | None = None if self._data.is_cpu else memory_of(self._data)
        self._data_dtype: torch.dtype = getattr(torch, scaled.data.dtype)
        self._most = AT_ONCE // (4 if scaled.is_mxfp4 else 1)  # it takes new memory, and more

    def bytes_of(self, index: tuple[slice, ...]) -> None:
        """Return None: no stored byte is a byte of the target."""

    def write(self, index: tuple[slice, ...], source: Array) -> None:
        """Fill what a box of stored numbers decides.

        Args:
            index: the box, as slices of the stored box.
            source: the stored numbers, as bytes.
        """
        corner = [o + s.start for o, s in zip(self._stored.offset, index, strict=True)]
        for part in split_into_boxes(source.shape, self._most):
            box = Box(tuple(map(add, corner, part.offset)), part.shape)
            numbers = np.ascontiguousarray(source[part.slices()])
            if self._scaled.is_mxfp4:
                self._write_mxfp4(box, numbers)
            else:
                self._write_fp8(box, numbers)
        self._scales.used(source.size)

    def _write_fp8(self, box: Box, numbers: Array) -> None:
        scales, cuts = self._scales.select(box)
        if scales.dtype == torch.uint8:  # exponents, as in e8m0
            factors = (scales.to(torch.float32) - 127.0).exp2()
        else:
            factors = scales.to(torch.float32)
        values = scale_fp8(numbers, self._data_dtype, factors, cuts, self._scratch)
        if self._scaled.rounds_to:
            values = values.to(getattr(torch, self._scaled.rounds_to))
        self._put(box.relative_to(self._box.offset), values)

    def _write_mxfp4(self, box: Box, numbers: Array) -> None:
        experts, rows, groups, size = box.shape
        columns = numbers.reshape(experts, rows, groups * size).transpose(0, 2, 1)
        unscaled = unpack_fp4(np.ascontiguousarray(columns))
        if self._data.dtype == torch.float64:  # as transformers, which multiplies in this dtype
            unscaled = unscaled.double()
        exponents = self._scales.select(box)[0].view(torch.uint8).to(torch.int32) - 127
        by_group = unscaled.view(experts, groups, 2 * size, rows)
        values = torch.ldexp(by_group, exponents.permute(0, 2, 3, 1))
        expert, row, group, byte = box.offset
        # Only a box of whole groups is one range of columns.
        step = groups if size == MXFP4_BYTES else 1
        for first in range(0, groups, step):
            part = values[:, first : first + step].reshape(experts, -1, rows)
            at = 2 * ((group + first) * MXFP4_BYTES + byte)
            whole = Box((expert, at, row), tuple(part.shape))
            wanted = whole.intersect(self._box)
            if wanted is not None:
                inside = part[wanted.relative_to(whole.offset).slices()]
                self._put(wanted.relative_to(self._box.offset), inside)

    def _put(self, box: Box, values: torch.Tensor) -> None:
        if self._memory is None:
            self._data[box.slices()].copy_(values)
            return
        source = view_for_numpy(values.to(self._data.dtype)).numpy()
        self._memory.write(box.slices(), source)  # on the right stream
