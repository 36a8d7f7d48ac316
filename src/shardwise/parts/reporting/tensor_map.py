"""Which rank or file holds which box of a tensor, for the map on the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.kernel.checkpoint import Checkpoint
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.parts.reporting.columns import Packer
from shardwise.parts.reporting.rank_data import as_json

MOST_TENSORS = 8
MOST_BOXES = 2**14
MOST_OWNERS = 2000
LONGEST_NAME = 200


def largest_tensors(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the largest tensors, one of each shape and dtype; at most eight."""
    largest: dict[tuple[object, ...], TensorEntry] = {}
    for entry in sorted(checkpoint.layout.tensors, key=_nbytes, reverse=True):
        if entry.same_as is None:
            largest.setdefault((entry.dtype, entry.shape), entry)
    return [entry.name for entry in largest.values()][:MOST_TENSORS]


def tensor_map(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Return the boxes of a tensor for the page. Of more than 16,384, only some are kept."""
    boxes = checkpoint.boxes(name)
    shown = boxes[:: -(-len(boxes) // MOST_BOXES) or 1]
    saved = checkpoint[name]
    numbers = np.array([owner for _, owner in shown], np.int64)
    owners, owner = np.unique(numbers, return_inverse=True)
    packer = Packer()
    corners = np.array([[*box.offset, *box.shape] for box, _ in shown], np.int64)
    columns = corners.reshape(len(shown), 2 * saved.ndim).T
    return {
        "name": name,
        "dtype": str(saved.dtype).removeprefix("torch."),
        "shape": list(saved.shape),
        "bytes": saved.nbytes,
        "boxes": len(boxes),
        "shown": len(shown),
        **_owners(checkpoint, owners.tolist()),
        "count": len(owners),
        "owner": [as_json(each) for each in packer.add_exact(owner.reshape(-1))],
        "corners": [[as_json(each) for each in packer.add_exact(column)] for column in columns],
        "packed": packer.text(),
    }


def _owners(checkpoint: Checkpoint, numbers: Sequence[int]) -> dict[str, Any]:
    """Return the ranks that hold boxes, and the names of their files; of the first 2,000.

    In a foreign checkpoint, files hold the boxes, because the ranks are not known.
    """
    numbers, layout = numbers[:MOST_OWNERS], checkpoint.layout
    kind = "rank" if layout.format == "shardwise" else "file"
    files = [
        layout.file_of_rank(number) if kind == "rank" else layout.files[number]
        for number in numbers
    ]
    names = ["" if file is None else file.name[:LONGEST_NAME] for file in files]
    return {"kind": kind, "owners": numbers, "files": names}


def _nbytes(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
