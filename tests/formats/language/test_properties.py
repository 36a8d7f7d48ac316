"""Random layouts, said in the language, and cut by a reference that knows nothing of it.

The reference numbers the elements of the whole tensor along all axes, and reorders them with
numpy's reshape and transpose; parts of sums are handled one by one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.breadth import examples
from tests.formats.language.rankfiles import Array, read, same

RANKS = ("tp", "ep")


@dataclass(frozen=True)
class Layout:
    """Axes by name and size, and how each side orders them: a list of dimensions of axes.

    One of the axes may be a sum of parts; it is a single axis of the sum of their sizes here.
    """

    sizes: dict[str, int]
    parts: tuple[int, ...]
    stored: tuple[tuple[str, ...], ...]
    whole: tuple[tuple[str, ...], ...]

    def text(self) -> str:
        def side(dims: tuple[tuple[str, ...], ...]) -> str:
            return "[" + " ".join("(" + " ".join(map(self.axis, dim)) + ")" for dim in dims) + "]"

        where = ", ".join(f"{a} = {n}" for a, n in self.declared().items())
        left, right = side(self.stored), side(self.whole)
        return f"ranks tp ep\nw {left} -> w {right} where {where}"

    def axis(self, name: str) -> str:
        if name != "s":
            return name
        return "(" + " + ".join(f"s{i}" for i in range(len(self.parts))) + ")"

    def declared(self) -> dict[str, int]:
        local = {a: n for a, n in self.sizes.items() if a not in (*RANKS, "s")}
        return local | {f"s{i}": n for i, n in enumerate(self.parts)}


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    locals_ = ["a", "b", "c", "s"][: draw(st.integers(1, 4))]
    sizes = {axis: draw(st.integers(1, 3)) for axis in (*locals_, *RANKS)}
    parts = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
    sizes["s"] = sum(parts) if "s" in locals_ else 1
    if "s" not in locals_:
        locals_.append("s")
        parts = (1,)
        sizes["s"] = 1

    def grouped(axes: list[str]) -> tuple[tuple[str, ...], ...]:
        order = draw(st.permutations(axes))
        cuts = sorted(draw(st.sets(st.integers(1, len(order) - 1), max_size=2)))
        edges = itertools.pairwise([0, *cuts, len(order)])
        return tuple(tuple(order[a:b]) for a, b in edges)

    return Layout(sizes, parts, grouped(locals_), grouped([*locals_, *RANKS]))


def cut(layout: Layout, whole: Array) -> dict[tuple[int, ...], dict[str, Array]]:
    """The array of each rank, by numpy alone."""
    order = [axis for dim in layout.whole for axis in dim]
    apart = whole.reshape([layout.sizes[axis] for axis in order])
    stored = [axis for dim in layout.stored for axis in dim]
    turned = apart.transpose([order.index(axis) for axis in (*RANKS, *stored)])
    shape = [math.prod(layout.sizes[axis] for axis in dim) for dim in layout.stored]
    ranks = itertools.product(*(range(layout.sizes[axis]) for axis in RANKS))
    return {rank: {"w": turned[rank].reshape(shape).copy()} for rank in ranks}


@examples(100)
@given(layouts())
def test_any_layout_is_read_element_for_element(layout: Layout) -> None:
    shape = [math.prod(layout.sizes[axis] for axis in dim) for dim in layout.whole]
    whole = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    axes = {axis: layout.sizes[axis] for axis in RANKS}
    same(read(layout.text(), axes, cut(layout, whole))["w"], whole)


@examples(40)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_unequal_shards_of_sums(shares: list[int], parts: list[int], width: int) -> None:
    total = sum(shares)
    whole = np.arange(sum(parts) * total * width, dtype=np.int32).reshape(sum(parts), total, width)
    begins = list(itertools.accumulate(shares, initial=0))
    ranks = {
        (t,): {"w": whole[:, begins[t] : begins[t + 1]].reshape(-1, width).copy()}
        for t in range(len(shares))
    }
    names = [f"s{i}" for i in range(len(parts))]
    where = ", ".join(f"{name} = {size}" for name, size in zip(names, parts, strict=True))
    text = f"ranks tp\nw -> w [(({' + '.join(names)}) tp ~f) h] where {where}"
    same(read(text, {"tp": len(shares)}, ranks)["w"], whole.reshape(-1, width))
