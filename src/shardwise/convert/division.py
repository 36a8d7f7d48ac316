"""Tensors cut into parts, and parts divided among files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from shardwise.convert.output import Part
from shardwise.layout import Box

T = TypeVar("T")


def cut(part: Part, most: int) -> list[Part]:
    """A whole tensor in parts of whole rows, each of at most so many bytes if a row is."""
    shape = part.box.shape
    if part.size <= most or not shape:
        return [part]
    rows, rest = shape[0], shape[1:]
    step = max(1, most // (part.size // rows))
    return [
        Part(part.name, Box((at, *(0,) * len(rest)), (min(step, rows - at), *rest)), part.dtype)
        for at in range(0, rows, step)
    ]


def split(things: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Things for each file, in order; one that is larger than `most` has a file of its own."""
    files: list[list[T]] = [[]]
    room = most
    for each in things:
        if files[-1] and size(each) > room:
            files.append([])
            room = most
        files[-1].append(each)
        room -= size(each)
    return files
