"""Boxes of global tensors, as integers only: no bytes, no devices, no torch."""

from shardwise.kernel.boxes.box import (
    Box,
    batch_boxes,
    find_overlaps,
    row_major_strides,
    split_into_boxes,
)
from shardwise.kernel.boxes.coverage import find_uncovered_tensors
from shardwise.kernel.boxes.flat import (
    RangeBoxes,
    boxes_of_range,
    boxes_of_ranges,
    boxes_within,
)
from shardwise.kernel.boxes.indexing import (
    SelectedPositions,
    boxes_of_covers,
    cover_positions,
    select_positions,
    split_into_batches,
)
from shardwise.kernel.boxes.mesh import Sharding, ShardPlacement, Split, shard_boxes, splits_of

__all__ = [
    "Box",
    "RangeBoxes",
    "SelectedPositions",
    "ShardPlacement",
    "Sharding",
    "Split",
    "batch_boxes",
    "boxes_of_covers",
    "boxes_of_range",
    "boxes_of_ranges",
    "boxes_within",
    "cover_positions",
    "find_overlaps",
    "find_uncovered_tensors",
    "row_major_strides",
    "select_positions",
    "shard_boxes",
    "split_into_batches",
    "split_into_boxes",
    "splits_of",
]
