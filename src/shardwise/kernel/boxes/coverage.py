"""Check that boxes cover tensors, and byte ranges fill files, without comparing them in pairs.

Both checks add up random hashes of the marks where boxes begin and end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import IntArray, check_table_size
from shardwise.kernel.boxes.grids import advance, expand_grids, merge_axes
from shardwise.kernel.errors import FormatError

Hashes = npt.NDArray[np.uint64]
MOST_SPLIT_DIMS = 12
MOST_CORNERS = 2**27
MOST_STRIDED_FILES = 2**28
"""The largest number of files times distances between files in `find_unfilled_files`."""


def find_uncovered_tensors(
    tensor_shapes: IntArray,
    tensor: IntArray,
    offset: IntArray,
    shape: IntArray,
    must_be_covered: npt.NDArray[np.bool_],
) -> IntArray:
    """Return the indices of the tensors that their boxes do not cover exactly once.

    The boxes must lie inside their tensors. They are not compared in pairs.

    Example: a tensor of 4 elements, and the boxes 0:2 and 2:4. Mark each start with +1 and each end
    with -1: there is +1 at 0, -1 at 2, +1 at 2, and -1 at 4. The marks at 2 cancel out. What
    remains, +1 at 0 and -1 at 4, are the marks of the whole tensor, so each element is covered
    once.

    In D dimensions, a box has marks at its 2^D corners, +1 or -1 each. Boxes cover a tensor exactly
    once if their marks cancel out to those of the whole tensor. To compare marks without a list of
    positions, the function adds up a random hash of each marked position. Different marks have
    equal sums with a probability of 2^-64.

    Args:
        tensor_shapes: shapes of the tensors, `(t, D)`, padded with 1.
        tensor: index of each box's tensor, `(n,)`.
        offset, shape: the boxes, `(n, D)`, padded with 0 and 1.
        must_be_covered: whether each tensor must be covered by boxes, `(t,)`.

    Raises:
        FormatError: the boxes split tensors in too many dimensions to be checked.
    """
    dims = tensor_shapes.shape[1]
    # In a dimension that no box splits, all boxes have the same two ends, so marks along this
    # dimension cannot tell boxes apart.
    is_split = (shape != tensor_shapes[tensor]).any(axis=0) if len(tensor) else np.zeros(dims, bool)
    split_dims = np.flatnonzero(is_split).tolist()
    if len(split_dims) > MOST_SPLIT_DIMS:
        raise FormatError(
            f"the pieces split tensors in {len(split_dims)} dimensions in total, but at most "
            f"{MOST_SPLIT_DIMS} are supported: shard tensors in fewer dimensions, or save their "
            "parts as separate tensors"
        )
    if len(tensor) << len(split_dims) > MOST_CORNERS:
        raise FormatError(
            f"{len(tensor)} pieces that split tensors in {len(split_dims)} dimensions are too many "
            f"to be checked: they have more than {MOST_CORNERS} corners; shard tensors in fewer "
            "dimensions, or into fewer parts"
        )
    seeds = np.random.default_rng().integers(2**64, size=dims + 1, dtype=np.uint64)
    sums = np.zeros(len(tensor_shapes), np.uint64)
    _add_corners(sums, tensor, offset, shape, split_dims, seeds)
    expected = np.zeros(len(tensor_shapes), np.uint64)
    covered = np.flatnonzero((tensor_shapes > 0).all(axis=1) & must_be_covered)
    whole = tensor_shapes[covered]
    _add_corners(expected, covered, np.zeros_like(whole), whole, split_dims, seeds)
    return np.flatnonzero(sums != expected)


def _add_corners(
    sums: Hashes,
    tensor: IntArray,
    offset: IntArray,
    shape: IntArray,
    dims: list[int],
    seeds: Hashes,
) -> None:
    """Add the signed hashes of all corners of boxes to the sums of their tensors."""
    for corner in range(2 ** len(dims)):
        hashes = _hash_elements(tensor.astype(np.uint64) + seeds[-1])
        for bit, dim in enumerate(dims):
            position = offset[:, dim] + (shape[:, dim] if corner >> bit & 1 else 0)
            hashes = _hash_elements(hashes ^ (position.astype(np.uint64) + seeds[dim]))
        is_negative = corner.bit_count() % 2 == 1
        np.add.at(sums, tensor, np.negative(hashes) if is_negative else hashes)


def _hash_elements(x: Hashes) -> Hashes:
    """Return the finaliser of splitmix64 (Steele, Lea, Flood 2014) for each element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def find_unfilled_files(
    length: IntArray,
    first: IntArray,
    extent: IntArray,
    count: IntArray,
    step: IntArray,
) -> IntArray:
    """Return the indices of the files that byte ranges do not fill exactly once.

    The ranges are grids in two dimensions, the file and the byte; see
    `shardwise.kernel.boxes.grids`. They are not compared in pairs, and most of them are not listed
    one by one.

    Each range adds a random hash of its start to its file, and subtracts that of its end. In a file
    that is filled exactly once, the start of the file and its end remain, as in
    `find_uncovered_tensors`. A grid adds the same number to many files. So only the first of them
    and the one after the last are marked, and running sums over all files give the numbers of each.

    Args:
        length: the number of bytes to fill in each file, `(files,)`.
        first, extent, count, step: the grids. All files exist, and no start is negative.

    Raises:
        FormatError: the grids are too irregular to be checked.
    """
    extent, count = merge_axes(extent, count, step)
    # Of the axes that change the file alone, the longest one is not expanded.
    candidates = np.where(step[:, :, 1] == 0, count, 0)
    if count.shape[1]:
        kept = candidates.argmax(axis=1)
        rows = np.arange(len(count))
        number = np.maximum(candidates[rows, kept], 1)
        distance = np.where(number > 1, step[rows, kept, 0], 1)
        count[rows, kept] = np.where(number > 1, 1, count[rows, kept])
        check_table_size(int(count.prod(axis=1, dtype=np.float64).sum()), 2)
        grid, k = expand_grids(count)
        first, extent = advance(first[grid], k, step[grid]), extent[grid]
        number, distance = number[grid], distance[grid]
    else:
        number, distance = np.ones(len(first), np.int64), np.ones(len(first), np.int64)
    seed = np.random.default_rng().integers(2**64, dtype=np.uint64)

    def hash_of(position: IntArray) -> Hashes:
        return _hash_elements(position.astype(np.uint64) + seed)

    value = hash_of(first[:, 1]) - hash_of(first[:, 1] + extent[:, 1])
    marks = _mark_files(len(length), first[:, 0], extent[:, 0], number, distance, value)
    expected = hash_of(np.zeros_like(length)) - hash_of(length)
    return np.flatnonzero(np.cumsum(marks)[: len(length)] != expected)


def _mark_files(
    files: int,
    first: IntArray,
    width: IntArray,
    number: IntArray,
    distance: IntArray,
    value: Hashes,
) -> Hashes:
    """Return numbers whose running sum is, for each file, the sum of the values that it gets.

    For example, of 4 files, the first two get the value 5 (`first` 0, `width` 2), and the last two
    get 7. The marks are 5, 0, 2, 0 and -7, and their running sum is 5, 5, 7 and 7. If instead the
    files 0 and 2 get 5 (`number` 2, `distance` 2), they are 5, -5, 5, -5 and 0.

    Args:
        files: the number of files.
        first, width, number, distance: the files that get each value: `number` ranges of `width`
            files, `distance` files apart.
        value: the values.
    """
    backward = distance < 0
    first = np.where(backward, first + (number - 1) * distance, first)
    distance = np.abs(distance)
    value = np.where(distance == 0, value * number.astype(np.uint64), value)
    number = np.where(distance == 0, 1, number)
    marks = np.zeros(files + 1, np.uint64)
    distances = np.unique(distance[number > 1]).tolist()
    expanded = number == 1
    strided = []
    for each in distances:
        rows = np.flatnonzero((distance == each) & (number > 1))
        if int(number[rows].sum()) > files:
            strided.append((each, rows))
        else:
            expanded[rows] = True
    if len(strided) * files > MOST_STRIDED_FILES:
        raise FormatError(
            f"the pieces are in ranks at {len(strided)} different distances, which are too many to "
            "be checked: save from fewer ranks"
        )
    rows = np.flatnonzero(expanded)
    check_table_size(int(number[rows].sum()), 2)
    grid, k = expand_grids(number[rows, None])
    rows = rows[grid]
    begin = first[rows] + k[:, 0] * distance[rows]
    np.add.at(marks, begin, value[rows])
    np.subtract.at(marks, begin + width[rows], value[rows])
    for each, rows in strided:
        padded = -(-(files + each + 1) // each) * each
        own = np.zeros(padded, np.uint64)
        begin, end = first[rows], first[rows] + number[rows] * each
        for position, sign in ((begin, 1), (end, -1)):
            add, subtract = (np.add.at, np.subtract.at)[::sign]
            add(own, position, value[rows])
            subtract(own, position + width[rows], value[rows])
        marks += own.reshape(-1, each).cumsum(axis=0, dtype=np.uint64).reshape(-1)[: files + 1]
    return marks
