"""A rank is killed at each store operation of a save: what was committed can be loaded."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.scenario import (
    assert_values,
    leftovers,
    restored,
    save_step,
    state_of,
    step_directory,
)
from tests.tools.gang import Gang, Outcome

WORLD = 2
OLD, NEW, AGAIN = 1, 2, 3  # the seeds of what was there, of what is killed, of what follows
SECONDS = 30.0
MOST = 1000


@pytest.fixture
def root(place: Path) -> Path:
    """A root with a committed step, whose values are those of seed `OLD`."""
    with sw.Checkpointer(place / "root", memory=None) as checkpointer:
        checkpointer.save(1, state_of(OLD))
    return place / "root"


def operations(gang: Gang, root: Path, victim: int) -> list[str]:
    """Those of a rank in a clean save of step 2."""
    copy = Path(shutil.copytree(root, root.parent / "clean"))
    seen = gang.run(save_step, copy, 2, NEW, victim, None, world=WORLD)
    assert restored(copy)[0] == 2
    assert leftovers(copy) == []
    shutil.rmtree(copy)
    return seen[victim]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("victim", "operations_of_a_kind"),
    mostly_long(
        [(victim, number) for victim in range(WORLD) for number in (1, MOST)],
        [(victim, 1) for victim in range(WORLD)],
    ),
)
def test_killed_at_any_operation_nothing_committed_is_lost(
    gang: Gang, root: Path, victim: int, operations_of_a_kind: int
) -> None:
    """Operations with the same verb, before the commit or after it, are of a kind."""
    seen = operations(gang, root, victim)
    verbs = [operation.split()[0] for operation in seen]
    assert {"create", "write_at", "commit"} <= set(verbs)
    commit_point = len(seen)
    if victim == 0:
        assert {"publish", "fsync", "link", "unlink", "published", "delete"} <= set(verbs)
        commit_point = verbs.index("link")
    tried: Counter[tuple[str, bool]] = Counter()
    for at, operation in enumerate(seen):
        tried[kind := (verbs[at], at > commit_point)] += 1
        if tried[kind] > operations_of_a_kind:
            continue
        copy = Path(shutil.copytree(root, root.parent / f"killed-{at}"))
        started = time.monotonic()
        outcomes = gang.run_outcomes(save_step, copy, 2, NEW, victim, at, world=WORLD)
        where = f"rank {victim} at operation {at} of {len(seen)}: {operation}"
        assert time.monotonic() - started < SECONDS, where
        assert outcomes[victim].kind == "died", where
        assert_other_noticed(outcomes[1 - victim], committed=at > commit_point, where=where)
        expected = (2, NEW) if at > commit_point else (1, OLD)
        assert_survives(copy, *expected, where=where)
        shutil.rmtree(copy)


def assert_other_noticed(outcome: Outcome, *, committed: bool, where: str) -> None:
    """Before the commit, the other rank learns that the save failed."""
    assert outcome.kind in (("error", "value") if committed else ("error",)), where
    if outcome.kind == "error":
        assert isinstance(outcome.exception, sw.LostRankError), f"{where}\n{outcome.report}"


def assert_survives(root: Path, step: int, seed: int, *, where: str) -> None:
    """The expected step is restored; the next save succeeds, and leaves nothing else behind."""
    for committed in root.glob("*/manifest.json"):
        assert sw.open(committed.parent).verify().bytes_checked, where
    found, state = restored(root)
    assert found == step, where
    assert_values(state, seed)
    assert step_directory(root, step).joinpath("manifest.json").exists(), where
    with sw.Checkpointer(root, keep=sw.Keep(last=1), memory=None) as checkpointer:
        checkpointer.save(2, state_of(AGAIN), overwrite=True)
        assert checkpointer.steps() == [2], where
    found, state = restored(root)
    assert found == 2, where
    assert_values(state, AGAIN)
    assert leftovers(root) == [], where
