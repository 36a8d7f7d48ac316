"""Bits that flip in memory: another copy is taken, or the older snapshot, and never wrong bytes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.breadth import mostly_long
from tests.faults.memory.scenario import Cluster, Went, assert_tidy, go_on
from tests.tools.agents import lose, until
from tests.tools.gang import Gang

SNAPSHOT = "shardwise-*/runs/*/step-{step:08d}-*/{name}"


def flip(found: Iterable[Path], at: int | None = None) -> list[str]:
    """Turn one bit of files, in their midst if it is not said where; their names."""
    names = []
    for path in found:
        data = bytearray(path.read_bytes())
        data[len(data) // 2 if at is None else at] ^= 1
        path.write_bytes(data)
        names.append(path.name)
    return names


def files(shm: Path, node: int | str, step: int, name: str) -> list[Path]:
    """Files of a snapshot on a node, or on all of them (`"*"`)."""
    return sorted(shm.glob(f"node{node}/{SNAPSHOT.format(step=step, name=name)}"))


def restored(gang: Gang, cluster: Cluster, until: int, world: int = 2) -> Went:
    """Restore on all ranks; where from. Then go on until a step."""
    went = gang.run(go_on, cluster, until, world=world, timeout=200.0)
    assert all((each.step, each.source) == (went[0].step, went[0].source) for each in went)
    return went[0]


@pytest.fixture
def copied(gang: Gang, root: Path, shm: Path) -> Cluster:
    """Two nodes that keep copies of each other's files, with the steps 1 to 3, and 2 in storage."""
    cluster = Cluster(root=root, shm=shm, nodes=2, every=2, options={"copies": 1, "wait": 2.0})
    gang.run(go_on, cluster, 3, world=2)
    return cluster


def test_another_copy_is_used_where_there_is_one(gang: Gang, shm: Path, copied: Cluster) -> None:
    step = 3
    for node, name in [
        (0, "r00000-*.safetensors"),
        (1, "r00000-*.safetensors"),
        (1, "r00001-*.safetensors"),
        (0, "manifest.json"),
        (1, "manifest.json"),
    ]:
        assert flip(files(shm, node, step, name)), name
        went = restored(gang, copied, step + 1)
        assert (went.step, went.source) == (step, "memory"), (node, name, went)
        step += 1
    assert_tidy(shm, 2)


KINDS = ("r00001-*.safetensors", "manifest.json")


@pytest.mark.parametrize(
    ("first", "then"), mostly_long([(a, b) for a in KINDS for b in KINDS], [KINDS])
)
def test_where_no_copy_is_left_the_older_one_is_taken(
    gang: Gang, shm: Path, copied: Cluster, first: str, then: str
) -> None:
    (*_, shown) = flip(files(shm, "*", 3, first))
    went = restored(gang, copied, 4)
    assert (went.step, went.source) == (2, "memory")
    assert shown in went.skipped or "manifest" in went.skipped
    assert "step 3" in went.skipped or "(3, " in went.skipped
    for step in (3, 4):
        flip(files(shm, "*", step, then))
    assert restored(gang, copied, 4).source == "storage"
    assert_tidy(shm, 2)


NOTES: list[tuple[object, str, int | None]] = [
    (0, "pending.json", 0),
    (0, "pending.json", None),
    ("*", "rank-*.json", 0),
    ("*", "rank-*.json", None),
    ("*", "save.json", 0),
    (1, "save.json", None),
]


@pytest.mark.parametrize("records", mostly_long([NOTES, NOTES[1::2]], [NOTES[1::2]]))
def test_a_note_that_is_damaged_stops_nothing(
    gang: Gang, shm: Path, copied: Cluster, records: list[tuple[object, str, int | None]]
) -> None:
    step = 3
    for node, name, at in records:
        assert flip(files(shm, node, step, name), at)
        went = restored(gang, copied, step + 4)
        assert (went.step, went.source) == (step, "memory"), (node, name, at)
        step += 4
    assert restored(gang, copied, step).step == step
    assert_tidy(shm, 2)


@pytest.fixture
def with_parity(gang: Gang, root: Path, shm: Path) -> Cluster:
    """Three nodes that protect each other by parity, with the steps 1 to 3, and 2 in storage."""
    cluster = Cluster(root=root, shm=shm, nodes=3, every=2, options={"parity": 1})
    gang.run(go_on, cluster, 3, world=3)
    return cluster


def test_parity_that_is_damaged_is_not_decoded_from(
    gang: Gang, shm: Path, with_parity: Cluster
) -> None:
    assert flip(files(shm, 1, 3, "parity-*.bin"), 5000)
    assert restored(gang, with_parity, 3, 3).step == 3
    lose(shm / "node2")
    went = restored(gang, with_parity, 2, 3)
    assert (went.step, went.source) == (2, "memory")
    assert "parity is damaged" in went.skipped
    until(lambda: not files(shm, "*", 3, "*"))


def test_a_damaged_file_is_decoded_from_parity(gang: Gang, shm: Path, with_parity: Cluster) -> None:
    assert flip(files(shm, 1, 3, "r00001-*.safetensors"))
    went = restored(gang, with_parity, 4, 3)
    assert (went.step, went.source) == (3, "memory")
    assert_tidy(shm, 3)
