"""The structures and coordinates that ranks send each other before a save."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from shardwise import MismatchError, RankError, ShardwiseError
from shardwise.kernel.engine import shared_structures
from shardwise.kernel.engine.shared_structures import encode_structure, share_structures
from shardwise.kernel.plan.structure import (
    AxisSplit,
    Description,
    RanksOfStructure,
    Structure,
    list_tensors,
)
from shardwise.testing.thread_group import run_ranks, run_ranks_and_catch

BUG = "This is a bug of shardwise: report it"
BY_ROWS = Structure(("w",), ("float32",), ((8, 4),), ((AxisSplit(0, 4, 1, 0),),), (0,))


def describe(coordinates: tuple[int, ...]) -> Description:
    box = np.array([[0, 0]], np.int64)
    return Description(BY_ROWS, coordinates, np.zeros(1, np.int64), box, box + 1)


def share(group: Any, coordinates: tuple[int, ...]) -> Any:
    fingerprint = shared_structures.digest_of(encode_structure(BY_ROWS))
    return share_structures(fingerprint, describe(coordinates), group)


def test_coordinates_of_all_ranks_are_shared() -> None:
    for _, structures in run_ranks(4, lambda group: share(group, (3 - group.rank,))):
        (shared,) = structures
        assert shared.ranks.tolist() == [0, 1, 2, 3]
        assert shared.coordinates.tolist() == [[3], [2], [1], [0]]


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ((), "it sent 0 coordinates for a structure with 1 axes"),
        ((1, 0), "it sent 2 coordinates for a structure with 1 axes"),
        ((4,), "it sent the coordinate 4 for an axis of 4 parts"),
        ((-1,), "it sent the coordinate -1 for an axis of 4 parts"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(sent: tuple[int, ...], told: str) -> None:
    outcomes = run_ranks_and_catch(2, lambda group: share(group, sent if group.rank else (0,)))
    for error in outcomes:
        if len(sent) == 1:
            assert isinstance(error, RankError)
            assert [*error.failures] == [1]
            assert f"{told}. {BUG}" in str(error)
        else:  # the coordinates of ranks with one structure are one table
            assert isinstance(error, ShardwiseError)
    alone = run_ranks_and_catch(1, lambda group: share(group, sent))
    assert f"{told}. {BUG}" in str(alone[0])


def test_ranks_that_are_described_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    describe_rank = shared_structures._describe

    def describe_as_rank_0(*args: Any) -> Any:
        described = describe_rank(*args)
        (members,) = described.members.values()
        return msgspec.structs.replace(
            described, members={b"x": msgspec.structs.replace(members, ranks=bytes(4))}
        )

    monkeypatch.setattr(shared_structures, "_describe", describe_as_rank_0)
    for error in run_ranks_and_catch(2, lambda group: share(group, (0,))):
        assert isinstance(error, ShardwiseError)
        assert f"2 states, not one for each rank. {BUG}" in str(error)


def test_a_tensor_that_differs_is_told_with_the_ranks_that_have_it() -> None:
    other = msgspec.structs.replace(BY_ROWS, dtypes=("float16",))
    structures = [
        RanksOfStructure(structure, np.array(ranks), np.zeros((2, 1), np.int64), fingerprint)
        for structure, ranks, fingerprint in ((BY_ROWS, [1, 3], b"a"), (other, [2, 4], b"b"))
    ]
    with pytest.raises(MismatchError) as caught:
        list_tensors(structures)
    assert caught.value.problems == ["w: float16 [8, 4] on rank 2, float32 [8, 4] on rank 1"]
