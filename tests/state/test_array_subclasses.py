"""Mapped files come back as arrays in memory; other subclasses of arrays are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwise as sw


def mapped(path: Path) -> Any:
    np.arange(6, dtype=np.int16).tofile(path)
    return np.memmap(path, np.int16, "r", shape=(2, 3))


def test_a_mapped_file_comes_back_as_an_array(tmp_path: Path) -> None:
    array = mapped(tmp_path / "numbers")
    sw.save(tmp_path / "save", {"value": {1: [array, "text"]}, "mine": sw.PerRank([array])})
    target = {"value": None, "mine": sw.PerRank(None)}
    sw.load(tmp_path / "save", target)
    for found in (target["value"][1][0], target["mine"].value[0]):  # type: ignore[index,union-attr]
        assert type(found) is np.ndarray
        assert (found.dtype, found.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    "array",
    [
        np.ma.masked_array(np.arange(3), mask=[0, 1, 0]),
        np.array([[1, 2]]).view(np.matrix),
        np.array([(1, 2.0)], [("a", int), ("b", float)]).view(np.recarray),
    ],
    ids=lambda array: type(array).__name__,
)
@pytest.mark.parametrize("wrap", [lambda a: {1: [a]}, sw.PerRank], ids=["value", "per rank"])
def test_other_subclasses_are_refused_by_name(tmp_path: Path, array: Any, wrap: Any) -> None:
    with pytest.raises(sw.StateError, match=r"x.*would come back as a plain array"):
        sw.save(tmp_path, {"x": wrap(array)})


def test_a_mask_is_never_lost(tmp_path: Path) -> None:
    array = np.ma.masked_array(np.arange(3), mask=[0, 1, 0])
    with pytest.raises(sw.StateError, match="x: a masked array would lose its mask"):
        sw.save(tmp_path, {"x": array})
