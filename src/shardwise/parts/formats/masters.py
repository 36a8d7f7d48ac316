"""Compares master weights with the weights of the model in the same files.

Frameworks that train in low precision keep a float32 copy of each weight beside the optimizer's
state, and round it to the weight after each step. Masters that differ by more belong to other
parameters or to another step, and so do the moments beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from operator import mul
from typing import TypeAlias

import torch

from shardwise.parts.formats.containers.ranges import FileRange
from shardwise.parts.formats.file_tree import FileTree
from shardwise.parts.formats.foreign import StoredArray

MASTER_DTYPES = frozenset({"float32", "float16", "bfloat16"})
_SAMPLED_BYTES, _FEWEST_SAMPLED = 2**24, 64
_ROUNDING_ULPS = 2

Run: TypeAlias = tuple[StoredArray, StoredArray]
"""Elements of a master weight that lie in a row, and the same elements of the weight: flat arrays
of equal length."""


def find_wrong_masters(tree: FileTree, runs: Iterable[tuple[str, Run]]) -> list[str]:
    """Return the parameters whose master weights contradict the weights of the model.

    Elements at the beginning of each run are compared: all elements of a small checkpoint, and
    about `_SAMPLED_BYTES` of a large one. Rounding to the precision of the weights is no
    contradiction; nor is rounding to 8 bits, if the weights have few distinct values.

    Args:
        runs: the name of a parameter and a run of it. A parameter may have several runs.

    Raises:
        FormatError: a run lies outside of its file.
    """
    comparable = [
        (name, run) for name, run in runs if {each.dtype for each in run} <= MASTER_DTYPES
    ]
    most = _SAMPLED_BYTES // (4 * _FEWEST_SAMPLED)
    step = -(-len(comparable) // most) or 1
    first_of = {name: index for index, (name, _) in reversed([*enumerate(comparable)])}
    sampled = sorted({*range(0, len(comparable), step), *first_of.values()})
    longest = max(_FEWEST_SAMPLED, _SAMPLED_BYTES // (4 * max(len(sampled), 1)))
    samples = [
        (name, *(part_of_run(array, 0, min(longest, array.shape[0])) for array in run))
        for name, run in (comparable[index] for index in sampled)
    ]
    values = read_runs(tree, {array for _, *pair in samples for array in pair})
    wrong = (name for name, one, other in samples if _contradict(values[one], values[other]))
    return list(dict.fromkeys(wrong))


def describe_wrong_masters(
    wrong: Sequence[str],
    cause: str = "the files are from different saves, or the weights were changed after a step",
    remedy: str = "copy all files of one save",
) -> str:
    """Return a line for `Builder.left_out` about the optimizer's state.

    Args:
        wrong: the result of `find_wrong_masters`.
        cause: how this can happen.
        remedy: what people can do, besides loading the weights alone.
    """
    return (
        f"optimizer.*: the master weights of {len(wrong)} parameters, such as "
        f"{', '.join(name[:200] for name in wrong[:3])}, contradict the weights of the model in "
        f"the same files, so the moments are wrong as well: {cause}. model.* has the weights of "
        f"the model. Load them with only=['model.*']; or {remedy}"
    )


def find_common_run(
    offset: tuple[int, ...],
    array: StoredArray,
    other_offset: tuple[int, ...],
    other: StoredArray,
) -> Run | None:
    """Return the elements of two boxes that lie in a row from the offset of the first.

    Returns:
        The elements, or None: the second box does not have this offset, or the dtypes are not those
        of master weights.
    """
    if not {array.dtype, other.dtype} <= MASTER_DTYPES:
        return None
    inner = tuple(a - b for a, b in zip(offset, other_offset, strict=True))
    if any(not 0 <= at < n for at, n in zip(inner, other.shape, strict=True)) or 0 in array.shape:
        return None
    if not any(inner) and array.shape == other.shape and _is_dense(array) and _is_dense(other):
        count = prod(array.shape)
    elif (array.stride[-1], other.stride[-1]) == (1, 1):
        count = min(array.shape[-1], other.shape[-1] - inner[-1])
    else:
        count = 1
    start = sum(map(mul, inner, other.stride))
    return part_of_run(array, 0, count), part_of_run(other, start, count)


def find_flat_run(
    masters: StoredArray, position: int, weights: StoredArray, start: int, count: int
) -> Run | None:
    """Return elements of a flattened weight, and the same elements of its master weight.

    Args:
        masters: a flat array with the master weights of several parameters.
        position: the first of these elements in it.
        weights: the weights, of any shape.
        start, count: the elements of the weights.

    Returns:
        The elements, or None: the weights do not lie in a row, or the dtypes are not those of
        master weights.
    """
    if not {masters.dtype, weights.dtype} <= MASTER_DTYPES or not _is_dense(weights):
        return None
    return part_of_run(masters, position, count), part_of_run(weights, start, count)


def _is_dense(array: StoredArray) -> bool:
    return array == StoredArray.contiguous(array.file, array.start, array.dtype, array.shape)


def part_of_run(array: StoredArray, first: int, count: int) -> StoredArray:
    """Return `count` elements that lie in a row in the file of an array, as a flat array.

    Args:
        first: the distance of the first of them from the start of the array, in elements.
    """
    start = array.start + first * array.itemsize
    return StoredArray.contiguous(array.file, start, array.dtype, (count,))


def read_runs(tree: FileTree, arrays: Iterable[StoredArray]) -> dict[StoredArray, torch.Tensor]:
    """Read flat arrays.

    Raises:
        FormatError: an array lies outside of its file.
    """
    by_file: dict[str, list[StoredArray]] = {}
    for array in sorted(arrays, key=lambda array: array.start):
        by_file.setdefault(array.file, []).append(array)

    def read(file: FileRange) -> dict[StoredArray, torch.Tensor]:
        ranges = [(a.start, a.shape[0] * a.itemsize) for a in by_file[file.name]]
        return {
            array: torch.frombuffer(bytearray(data), dtype=getattr(torch, array.dtype))
            for array, data in zip(by_file[file.name], file.read_ranges(ranges), strict=True)
        }

    values: dict[StoredArray, torch.Tensor] = {}
    for found in tree.read_each(by_file, read).values():
        values |= found
    return values


def _contradict(masters: torch.Tensor, weights: torch.Tensor) -> bool:
    """Return whether masters differ from weights by more than the rounding of the weights.

    The files hold weights of 8 or fewer bits in a larger dtype.
    """
    types = [torch.finfo(each.dtype) for each in (masters, weights)]
    size = weights.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    smallest = max(each.tiny * each.eps for each in types) + torch.finfo(torch.float32).tiny
    allowed = _ROUNDING_ULPS * (max(each.eps for each in types) * size + smallest)
    few = 4 * len({*size[:128].tolist()}) <= min(len(size), 128) * 3
    if few and len(size) >= 32:
        allowed = torch.maximum(allowed, size / 8 + size.max() / 64)
    is_near = (masters.double() - weights.double()).abs() <= allowed
    # These are not near, but the same: infinities, also by rounding, and what is not a number.
    is_same = (masters.to(weights.dtype) == weights) | (masters.isnan() & weights.isnan())
    return not bool((is_near | is_same).all())
