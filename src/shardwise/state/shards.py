"""Shards handed over by hand, for frameworks that no adapter knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.errors import LayoutError
from shardwise.layout import Box
from shardwise.state.leaves import Fragment


class Shards:
    """This rank's part of a global tensor: local tensors, and the box that each one covers.

    Use it in the state in place of a tensor. A load fills the local tensors.

    Args:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor.
        parts: pairs of a box and a local tensor of the box's shape; empty if this rank holds
            nothing.

    Raises:
        LayoutError: a part does not fit its box, or the tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[tuple[Box, torch.Tensor]],
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        whole = Box.whole(self.shape)
        for box, data in parts:
            if (
                tuple(data.shape) != box.shape
                or data.dtype != dtype
                or len(box.shape) != len(self.shape)
            ):
                raise LayoutError(
                    f"a local {data.dtype} tensor of shape {list(data.shape)} is no part {box} "
                    f"of a {dtype} tensor of shape {list(self.shape)}"
                )
            if not whole.contains(box):
                raise LayoutError(f"box {box} lies outside a tensor of shape {list(self.shape)}")
        self.fragments = tuple(Fragment(box, data) for box, data in parts if box.size)
