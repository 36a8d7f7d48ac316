"""Boxes of global tensors, as integers only: no bytes, no devices, no torch."""

from shardwise.layout.box import Box, split_into_boxes
from shardwise.layout.coverage import find_uncovered_tensors
from shardwise.layout.flat import (
    RangeBoxes,
    boxes_of_range,
    boxes_of_ranges,
    boxes_within,
    row_major_strides,
)
from shardwise.layout.indexing import (
    SelectedPositions,
    boxes_of_covers,
    cover_positions,
    select_positions,
    split_into_batches,
)
from shardwise.layout.mesh import MeshShard, Sharding, Split, shard_boxes, splits_of
from shardwise.layout.overlap import Overlaps, find_overlaps

__all__ = [
    "Box",
    "MeshShard",
    "Overlaps",
    "RangeBoxes",
    "SelectedPositions",
    "Sharding",
    "Split",
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
