"""The bytes of a rank's file, copied from tensors of any dtype, layout and size."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.kernel.engine.tensors import ELEMENTS_AT_ONCE
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.plan.save import PieceTable
from shardwise.kernel.state.local_state import Fragment
from tests.tools.divisions import DTYPES_HERE, shapes

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1) if t.ndim else t,
    "sliced": lambda t: t[..., ::2] if t.ndim else t,
    "expanded": lambda t: t.expand(3, *t.shape),
    "of a larger one": lambda t: t[1:] if t.ndim and len(t) > 1 else t,
    "parameter": lambda t: torch.nn.Parameter(t) if t.is_floating_point() else t,
}


@dataclass
class Content:
    """A file of tensors, and its bytes: from the header to the objects."""

    source: FileSource
    expected: bytes


def content_of(
    tensors: list[tuple[torch.Tensor, list[Box]]], header: bytes = b"", objects: bytes = b""
) -> Content:
    """Return a file that has these boxes of these tensors, in this order."""
    fragments, index, boxes, ends = [], [], [], [0]
    expected = bytearray(header)
    for i, (tensor, parts) in enumerate(tensors):
        corner = tuple(range(1, tensor.ndim + 1))  # where it is in the global tensor
        fragments.append(Fragment(Box(corner, tuple(tensor.shape)), tensor))
        for box in parts:
            values = [row.reshape(-1).tolist() for row in _bytes_of(tensor, box)]
            expected += bytes(itertools.chain(*values))
            ends.append(len(expected) - len(header))
            index.append(i)
            offset = tuple(o + c for o, c in zip(box.offset, corner, strict=True))
            boxes.append(Box(offset, box.shape))
    data_at, objects_at = len(header), len(expected)
    expected += objects
    size = len(expected)
    entry = FileEntry("", 0, size, data_at, objects_at, size, 0)
    pieces = PieceTable(np.array(ends, np.int64), index, boxes)
    source = FileSource(pieces, fragments, (header, entry), objects)
    return Content(source, bytes(expected))


def _bytes_of(tensor: torch.Tensor, box: Box) -> Iterator[torch.Tensor]:
    """Yield the bytes of each element of a box, in row-major order."""
    for place in np.ndindex(box.shape):
        element = tensor.detach()[tuple(map(sum, zip(box.offset, place, strict=True)))]
        yield element.reshape(1).view(torch.uint8)


def random_tensor(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits: of NaNs too, and of bools that are neither 0 nor 1."""
    itemsize = getattr(torch, dtype).itemsize
    bits = np.random.default_rng(seed).integers(0, 256, math.prod(shape) * itemsize, np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, dtype)).reshape(shape)


@st.composite
def contents(draw: st.DrawFn) -> Content:
    """Draw a file of tensors that follow each other in any order, aligned to their types or not."""
    tensors = []
    dtypes = draw(st.lists(st.sampled_from(DTYPES_HERE), min_size=1, max_size=3))
    for seed in range(draw(st.integers(0, 12))):
        shape = draw(shapes)
        if size := math.prod(shape):
            tensor = random_tensor(draw(st.sampled_from(dtypes)), shape, seed)
            tensor = LAYOUTS[draw(st.sampled_from([*LAYOUTS]))](tensor)
            size = tensor.numel()
            cuts = sorted(draw(st.lists(st.integers(0, size), max_size=2)))
            edges = itertools.pairwise([0, *cuts, size])
            boxes = [box for a, b in edges for box in boxes_of_range(tuple(tensor.shape), a, b)]
            tensors.append((tensor, boxes))
    header, objects = (draw(st.sampled_from([0, 3, 8, 16])) * b"h" for _ in range(2))
    return content_of(tensors, header, objects)


@given(contents(), st.integers(1, 200), st.sampled_from([0, 1, 8]), st.data())
def test_any_range_has_the_bytes_of_the_tensors(
    content: Content, most: int, misalignment: int, data: st.DataObject
) -> None:
    """Whatever is copied at once; ranges cut elements nowhere, as those of a save do not."""
    source, expected = content.source, content.expected
    ends = {0, len(expected), source.entry.data_at, source.entry.objects_at}
    for start, end, i in zip(
        source.pieces.start.tolist(), source.pieces.start.tolist()[1:], source.pieces.fragment,
        strict=False,
    ):  # fmt: skip
        step = source._fragments[i].data.element_size()
        ends |= {each + source.entry.data_at for each in range(start, end + 1, step)}
    cuts = data.draw(st.lists(st.sampled_from(sorted(ends)), max_size=3))
    memory = np.full(len(expected) + misalignment, 7, np.uint8)
    out = memory[misalignment:]
    with patch("shardwise.kernel.engine.tensors.ELEMENTS_AT_ONCE", most):
        for low, high in itertools.pairwise(sorted([0, *cuts, len(expected)])):
            source.fill(low, high, out[low:high])
            assert out[:high].tobytes() == expected[:high]
    assert not (memory[:misalignment] != 7).any()


class Calls(TorchFunctionMode):
    """Counts the calls of torch, and the elements that each `cat` joins."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()
        self.joined: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count[func.__name__] += 1
        if func is torch.cat:
            self.joined.append(sum(map(torch.numel, args[0])))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Counts the bytes that are read from tensors one by one."""
    found: list[int] = []

    def read(memory: Any, index: Any, out: np.ndarray, *, wait: bool = True) -> None:
        found.append(out.nbytes)
        reading.temp_original(memory, index, out, wait=wait)

    reading = patch("shardwise.kernel.engine.tensors.HostMemory.read", read)
    with reading:
        yield found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e5m2"])
def test_small_tensors_are_copied_together(dtype: str) -> None:
    """With few calls, none of which is so large that torch would use more threads for it."""
    size = getattr(torch, dtype).itemsize
    whole = torch.arange(1000 * 70 * size, dtype=torch.int32).to(torch.uint8)
    tensors = whole.view(getattr(torch, dtype)).view(1000, 7, 10).unbind()
    box = Box.whole((7, 10))
    pieces = PieceTable(70 * size * np.arange(1001), [*range(1000)], [box] * 1000)
    source = FileSource(pieces, [Fragment(box, each) for each in tensors])
    out = np.zeros(len(whole), np.uint8)
    with Calls() as calls, counted_reads() as reads:
        source.fill(0, len(out), out)
    assert out.tobytes() == whole.numpy().tobytes()
    assert not reads
    assert max(calls.joined) <= ELEMENTS_AT_ONCE < 1 << 15
    assert sum(calls.joined) == 70_000
    assert len(calls.joined) == 3


def test_large_tensors_are_not_joined() -> None:
    tensors = [torch.full((n,), float(n)) for n in (10, ELEMENTS_AT_ONCE + 1, 20)]
    boxes = [Box.whole(tuple(each.shape)) for each in tensors]
    ends = np.cumsum([0, *(each.nbytes for each in tensors)])
    fragments = [*map(Fragment, boxes, tensors)]
    source = FileSource(PieceTable(ends, [0, 1, 2], boxes), fragments)
    out = np.zeros(int(ends[-1]), np.uint8)
    with Calls() as calls, counted_reads() as reads:
        source.fill(0, len(out), out)
    assert out.tobytes() == torch.cat(tensors).numpy().tobytes()
    assert calls.joined == [10, 20]
    assert reads == [tensors[1].nbytes]


def test_only_the_fragments_of_a_range_are_looked_up() -> None:
    """Each of them once; so a sequence may make them when they are asked for."""
    looked_up = Counter[int]()

    class Lazy(list[Fragment]):
        def __getitem__(self, index: Any) -> Any:
            looked_up[index] += 1
            return super().__getitem__(index)

    box = Box((0,), (8,))
    fragments = Lazy(Fragment(box, torch.full((8,), i, dtype=torch.uint8)) for i in range(100))
    source = FileSource(PieceTable(8 * np.arange(101), [*range(100)], [box] * 100), fragments)
    looked_up.clear()
    out = np.zeros(100, np.uint8)
    source.fill(204, 304, out)
    assert looked_up == Counter(range(25, 38))
    assert out.tolist() == [i // 8 for i in range(204, 304)]
