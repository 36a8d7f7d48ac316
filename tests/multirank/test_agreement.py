"""Ranks that do not agree are told so, on all ranks; plans that they agree on are used again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.breadth import mostly_long
from tests.tools.gang import Gang, Outcome


def all_refused(outcomes: list[Outcome], *needles: str) -> None:
    """Every rank raised a MismatchError that says all of this."""
    for outcome in outcomes:
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        for needle in needles:
            assert needle in str(outcome.exception)


def save_different_values(path: str) -> None:
    rank = dist.get_rank()
    sw.save(path, {"same": 1, "loss": float(rank), "deep": {"list": [0, rank]}})


def test_plain_values_that_differ_are_all_named(gang: Gang, tmp_path: Path) -> None:
    outcomes = gang.run_outcomes(save_different_values, str(tmp_path), world=3)
    all_refused(outcomes, "loss", "deep.list.1", "sw.PerRank")


def save_elsewhere(path: str) -> None:
    sw.save(f"{path}/{dist.get_rank()}", {"t": torch.ones(1)})


def test_ranks_that_save_to_different_places_are_told(gang: Gang, tmp_path: Path) -> None:
    all_refused(gang.run_outcomes(save_elsewhere, str(tmp_path), world=2), "rank 1", "/1")


def save_different_shapes(path: str) -> None:
    sw.save(path, {"t": torch.ones(2 + dist.get_rank())})


def test_ranks_with_different_shapes_are_told(gang: Gang, tmp_path: Path) -> None:
    all_refused(gang.run_outcomes(save_different_shapes, str(tmp_path), world=2), "t:", "[3]")


def save_flipped(path: str) -> None:
    """Replicas of which one differs in one bit."""
    data = torch.ones(1000)
    if dist.get_rank() == 1:
        data.view(torch.int32)[500] ^= 1
    sw.save(path, {"fine": torch.zeros(3), "flipped": data}, check_replicas=True)


def test_a_replica_that_differs_in_one_bit_is_found(gang: Gang, tmp_path: Path) -> None:
    outcomes = gang.run_outcomes(save_flipped, str(tmp_path), world=2)
    all_refused(outcomes, "flipped[0:1000]: rank 0 and rank 1 differ")
    assert "fine" not in str(outcomes[0].exception)


def save_replicas(path: str) -> sw.SaveReport:
    return sw.save(path, {"a": torch.ones(3_000_000), "b": torch.ones(1_000_000)})


def test_replicas_are_divided_by_bytes(gang: Gang, tmp_path: Path) -> None:
    reports = gang.run(save_replicas, str(tmp_path), world=4)
    written = [report.bytes_written for report in reports]
    assert max(written) <= 1.1 * sum(written) / 4
    assert reports[0].bytes_total == 16_000_000
    assert reports[0].bytes_deduplicated == 48_000_000


def save_repeatedly(path: str) -> list[tuple[bool, int]]:
    """By one Checkpointer: again, with other values elsewhere in memory, with another structure."""
    checkpointer = sw.Checkpointer(path, memory=None, keep=sw.Keep(last=10))
    seen: list[tuple[bool, int]] = []

    def save(state: dict[str, Any]) -> None:
        report = checkpointer.save(len(seen), state).result()
        seen.append((report.plan_cached, report.bytes_communicated))

    def tensors(value: float, count: int = 500) -> dict[str, Any]:
        return {f"t{i}": torch.full((10,), value + i) for i in range(count)}

    save(tensors(0))
    moved = tensors(1000)
    save(moved)
    loaded = tensors(0)
    sw.load(path, loaded)
    assert all(torch.equal(loaded[name], moved[name]) for name in moved)
    save(tensors(0, 501))
    save({name: value.double() for name, value in tensors(0).items()})
    save(tensors(0))
    # On one rank alone another structure: then no rank uses its plan.
    extra = {"extra": torch.ones(2)} if dist.get_rank() == 1 else {}
    save(tensors(0) | extra)
    checkpointer.close()
    return seen


def test_plans_are_used_again_for_the_same_structure_only(gang: Gang, tmp_path: Path) -> None:
    for rank, seen in enumerate(gang.run(save_repeatedly, str(tmp_path), world=2)):
        assert [cached for cached, _ in seen] == [False, True, False, False, True, False]
        first, second = seen[0][1], seen[1][1]
        assert first > 1000  # the structure, compressed
        assert second < 1000, (rank, first, second)


def train_with_dropout(path: str) -> None:
    """A run that stops and goes on draws what the uninterrupted one draws."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    dropout = nn.Dropout(0.5)
    draw = [dropout(torch.ones(8)) for _ in range(3)]
    state = {"rng": sw.RngState(), "mine": sw.PerRank([rank])}
    sw.save(path, state)
    expected = [(dropout(torch.ones(8)), random.random()) for _ in range(3)]
    torch.manual_seed(123)
    sw.load(path, state)
    for mask, number in expected:
        assert torch.equal(dropout(torch.ones(8)), mask)
        assert random.random() == number
    assert len(draw) == 3


def test_every_rank_goes_on_with_its_own_randomness(gang: Gang, tmp_path: Path) -> None:
    gang.run(train_with_dropout, str(tmp_path), world=3)


def load_different(path: str) -> None:
    """A name that only rank 1 wants, and that is not there."""
    target: dict[str, Any] = {"t": torch.zeros(4)}
    if dist.get_rank() == 1:
        target["more"] = torch.zeros(1)
    try:
        sw.load(path, target)
    finally:
        assert target["t"].sum() == 0


def test_a_mismatch_on_one_rank_stops_all_before_anything_is_written(
    gang: Gang, tmp_path: Path
) -> None:
    sw.save(tmp_path, {"t": torch.ones(4)})
    all_refused(gang.run_outcomes(load_different, str(tmp_path), world=2), "more")


def save_two_kinds(root: str, shm: str | None, what: str) -> list[object]:
    """On rank 1, `best` is another kind of value than on rank 0, from the third step on."""
    memory = None if shm is None else sw.Memory(dir=shm)
    kinds = {"plain": 0.5, "tensor": torch.tensor(0.5), "per rank": sw.PerRank(0.5)}
    own = kinds[what.split(", ")[dist.get_rank()]]
    raised: list[object] = []
    with sw.Checkpointer(root, memory=memory, keep=sw.Keep(last=1)) as checkpointer:
        for step in range(1, 6):
            state: dict[str, object] = {"w": torch.full((3,), float(step))}
            if step in (3, 4) or (dist.get_rank() and step < 3 and what == "plain, tensor"):
                state["best"] = own
            try:
                checkpointer.save(step, state)
            except sw.MismatchError as error:
                raised.append(str(error))
    return raised


@pytest.mark.parametrize(
    ("what", "where"),
    mostly_long(
        [
            (what, where)
            for what in ("plain, tensor", "tensor, per rank", "per rank, plain")
            for where in ("storage", "memory")
        ],
        [
            ("plain, tensor", "storage"),
            ("tensor, per rank", "memory"),
            ("per rank, plain", "storage"),
        ],
    ),
)
def test_a_name_of_two_kinds_is_refused_at_every_save(
    gang: Gang, tmp_path: Path, what: str, where: str
) -> None:
    root, shm = str(tmp_path / "run"), str(tmp_path / "memory") if where == "memory" else None
    for raised in gang.run(save_two_kinds, root, shm, what, world=2):
        assert len(raised) == 2, raised
        assert all("best: " in each and "different kinds" in each for each in raised)
    loaded = {"w": torch.zeros(3)}
    with sw.Checkpointer(root, memory=None) as checkpointer:
        assert checkpointer.restore(loaded, only=["w"]) == 5
    assert loaded["w"].tolist() == [5.0] * 3
