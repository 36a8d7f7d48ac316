"""What is said of replicas that differ, and what is done about them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from shardwise.divergence.differences import (
    Divergence,
    DivergencePolicy,
    SampleDetails,
    SampleDigests,
    find_differing_sets,
    find_divergences,
    group_ranks,
)
from shardwise.layout import Box


def divergence(*groups: tuple[int, ...], boxes: int = 1, equal_at: int | None = None) -> Divergence:
    own = tuple(Box((i, 0), (1, 8)) for i in range(boxes))
    return Divergence(step=7, equal_at=equal_at, tensor="w", boxes=own, groups=groups)


@pytest.mark.parametrize(
    ("groups", "minority", "text"),
    [
        (((0,), (1,)), (), "w[0:1,0:8]: rank 0 and rank 1 differ"),
        (((0, 2), (1,)), (1,), "w[0:1,0:8]: rank 1 differs from ranks 0, 2"),
        (((1, 2, 3), (0,), (4,)), (0, 4), "w[0:1,0:8]: ranks 0, 4 differ from ranks 1, 2, 3"),
        (((0, 1), (2, 3)), (), "w[0:1,0:8]: ranks 0, 1 and ranks 2, 3 differ"),
        (((0, 1), (2,), (3,)), (), "w[0:1,0:8]: ranks 0, 1 and rank 2 and rank 3 differ"),
    ],
)
def test_who_is_alone_is_named_if_more_than_half_agree(
    groups: tuple[tuple[int, ...], ...], minority: tuple[int, ...], text: str
) -> None:
    found = divergence(*groups)
    assert found.minority == minority
    assert str(found) == text


def test_long_lists_are_shortened() -> None:
    found = divergence(tuple(range(1, 100)), (0,), boxes=5, equal_at=3)
    assert str(found) == (
        "w[0:1,0:8], [1:2,0:8], [2:3,0:8] and 2 more boxes: rank 0 differs from "
        "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 91 more (equal at step 3)"
    )


def test_ranks_are_grouped_by_what_they_hold() -> None:
    assert group_ranks([0, 3, 4, 9], [5, 6, 6, 5]) == ((0, 9), (3, 4))
    assert group_ranks([0, 1, 2], [1, 2, 2]) == ((1, 2), (0,))


def test_only_digests_of_the_same_set_and_save_are_compared() -> None:
    def message(save_id: str, digests: dict[int, bytes], position: int = 3) -> bytes:
        return msgspec.msgpack.encode(SampleDigests(save_id, position, digests))

    messages = [
        b"",
        message("a", {0: b"x", 1: b"x", 2: b"x"}),
        message("a", {0: b"x", 1: b"y"}),
        message("b", {0: b"y", 1: b"z", 2: b"x"}),
        message("a", {0: b"z"}, position=4),
    ]
    assert find_differing_sets(messages) == {1: 1}
    assert find_differing_sets([b"", b""]) == {}


def test_boxes_of_a_tensor_that_differ_on_the_same_ranks_are_reported_together() -> None:
    boxes = [("a", (0,), (4,)), ("a", (4,), (4,)), ("a", (8,), (4,)), ("b", (), ())]

    def details(rank: int, *checksums: int) -> list[SampleDetails]:
        table = {5: np.array(checksums, np.uint32).tobytes()}
        is_first = rank == 1
        return [SampleDetails(9, table, {5: boxes} if is_first else {}, {5: 3} if is_first else {})]

    messages = [[], details(1, 1, 2, 3, 4), details(2, 7, 2, 7, 7), details(3, 1, 2, 3, 4)]
    first, second = find_divergences(messages, {5: 1})
    assert (first.tensor, first.boxes) == ("a", (Box((0,), (4,)), Box((8,), (4,))))
    assert (second.tensor, second.boxes) == ("b", (Box((), ()),))
    assert {each.minority for each in (first, second)} == {(2,)}
    assert {(each.step, each.equal_at) for each in (first, second)} == {(9, 3)}


def test_the_first_pattern_that_matches_decides() -> None:
    policy = DivergencePolicy.from_option({"*.running_*": "ignore", "model.*": "raise"})
    assert policy.reaction_to("model.bn.running_mean") == "ignore"
    assert policy.reaction_to("model.weight") == "raise"
    assert policy.reaction_to("optimizer.step") == "warn"
    assert not policy.ignores_all
    assert DivergencePolicy.from_option("ignore").ignores_all


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (None, TypeError),
        (3, TypeError),
        ({3: "warn"}, TypeError),
        ("loud", ValueError),
        ({"*": "loud"}, ValueError),
        ({"*": None}, ValueError),
    ],
)
def test_unknown_reactions_are_refused(option: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="on_divergence="):
        DivergencePolicy.from_option(option)
