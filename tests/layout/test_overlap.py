"""Overlaps of all tensors at once, against boxes intersected one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import Box, find_overlaps

DIMS = 2
Row = tuple[int, Box]

rows = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.builds(
            Box,
            st.tuples(*[st.integers(0, 5)] * DIMS),
            st.tuples(*[st.integers(0, 4)] * DIMS),
        ),
    ),
    max_size=12,
)


def columns(
    listed: list[Row],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return (
        np.array([tensor for tensor, _ in listed], np.int64),
        np.array([box.offset for _, box in listed], np.int64).reshape(-1, DIMS),
        np.array([box.shape for _, box in listed], np.int64).reshape(-1, DIMS),
    )


@given(rows, rows, st.integers(1, 40))
def test_every_common_part_is_found_in_order(
    left: list[Row], right: list[Row], pairs_at_once: int
) -> None:
    found = find_overlaps(columns(left), columns(right), pairs_at_once=pairs_at_once)
    expected = [
        (i, j, common.offset, common.shape)
        for i, (one, box) in enumerate(left)
        for j, (other, against) in enumerate(right)
        if one == other and (common := box.intersect(against)) is not None
    ]
    listed = zip(
        found.left.tolist(),
        found.right.tolist(),
        map(tuple, found.offset.tolist()),
        map(tuple, found.shape.tolist()),
        strict=True,
    )
    assert list(listed) == expected
