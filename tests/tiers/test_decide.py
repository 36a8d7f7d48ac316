"""What is copied to a mirror, and what is removed from which tier: tables, and random histories."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.kernel.engine.root import CheckpointInfo
from shardwise.parts.tiers.decide import TierPlan, decide_tiers

ALL = sw.Keep()


def tier(steps: str, *, loss: dict[int, float] | None = None) -> dict[int, CheckpointInfo]:
    """Return the checkpoints in a text like "1 2 3b"; the letter stands for another save."""
    found = {}
    for word in steps.split():
        step, save = int(word.rstrip("ab?")), word.lstrip("0123456789") or "a"
        metrics = {"loss": loss[step]} if loss and step in loss else {}
        found[step] = CheckpointInfo(step * 3600.0, metrics, save)
    return found


@dataclass(frozen=True)
class Case:
    root: str
    mirror: str
    keep: sw.Keep = ALL
    mirror_keep: sw.Keep = ALL
    newest: int | None = 9
    damaged: tuple[int, ...] = ()
    copy: tuple[int, ...] = ()
    from_root: tuple[int, ...] = ()
    from_mirror: tuple[int, ...] = ()
    pinned: tuple[int, ...] = ()
    loss: dict[int, float] = field(default_factory=dict)


# fmt: off
CASES = {
    "nothing": Case("", ""),
    "equal": Case("1 2 3", "1 2 3"),
    "newest first": Case("1 2 3", "", copy=(3, 2, 1)),
    "what the mirror lacks": Case("1 2 3", "2", copy=(3, 1)),
    "the mirror has more": Case("3", "1 2 3"),
    "another save of the step": Case("1 2b", "1 2", copy=(2,)),
    "removed once mirrored": Case("7 8 9", "7 8 9", keep=sw.Keep(last=1), from_root=(7, 8)),
    "pinned until mirrored": Case(
        "7 8 9", "8 9", keep=sw.Keep(last=1), copy=(7,), from_root=(8,), pinned=(7,)
    ),
    "another save is not mirrored": Case(
        "7b 8 9", "7 8 9", keep=sw.Keep(last=1), copy=(7,), from_root=(8,), pinned=(7,)
    ),
    "the mirror does not want it": Case(
        "7 8 9", "9", keep=sw.Keep(last=1), mirror_keep=sw.Keep(last=2), copy=(8,),
        from_root=(7,), pinned=(8,),
    ),
    "the mirror keeps fewer": Case(
        "8 9", "6 7 8 9", mirror_keep=sw.Keep(last=2), from_mirror=(6, 7)
    ),
    "nothing leaves the mirror before it is replaced there": Case(
        "8 9", "1 2", mirror_keep=sw.Keep(last=2), copy=(9, 8)
    ),
    "a part is replaced": Case(
        "8 9", "1 2 9", mirror_keep=sw.Keep(last=2), copy=(8,), from_mirror=(1,)
    ),
    "the best stays in the mirror": Case(
        "9", "1 2 9", mirror_keep=sw.Keep(last=1, best=sw.Best("loss")), from_mirror=(2,),
        loss={1: 0.5, 2: 0.7, 9: 1.0},
    ),
    "damaged in the root": Case(
        "7 8 9", "9", keep=sw.Keep(last=2), damaged=(8,), copy=(7,), pinned=()
    ),
    "unknown newest removes nothing": Case(
        "7 8 9", "1 9", keep=sw.Keep(last=1), mirror_keep=sw.Keep(last=1), newest=None
    ),
    "a branch that was left is copied last and stays": Case(
        "4 5 7 8", "7", keep=sw.Keep(last=1), mirror_keep=sw.Keep(last=1), newest=5, copy=(5, 8),
        from_root=(4,),
    ),
    "a branch that was left stays in the mirror": Case(
        "5", "4 5 7 8", mirror_keep=sw.Keep(last=1), newest=5, from_mirror=(4,)
    ),
    "the newest stays in the root": Case(
        "5 6", "5 6", keep=sw.Keep(multiple_of=5), newest=6
    ),
}
# fmt: on


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_table(case: Case) -> None:
    root, mirror = tier(case.root, loss=case.loss), tier(case.mirror, loss=case.loss)
    assert decide_tiers(
        root, mirror, case.keep, case.mirror_keep, case.newest, case.damaged
    ) == TierPlan(
        copy=case.copy,
        remove_from_root=case.from_root,
        remove_from_mirror=case.from_mirror,
        pinned=case.pinned,
    )


keeps = st.builds(
    sw.Keep,
    last=st.none() | st.integers(1, 3),
    multiple_of=st.none() | st.integers(1, 4),
    every_time=st.none() | st.sampled_from(["1h", "150m", "4h"]),
    latest_for=st.none() | st.sampled_from(["1h", "3h"]),
    best=st.none() | st.just(sw.Best("loss")),
)
stored = st.builds(
    CheckpointInfo,
    st.none() | st.floats(0, 1e5),
    st.dictionaries(st.just("loss"), st.floats(0, 1)),
    st.sampled_from("ab"),
)
checkpoints = st.dictionaries(st.integers(0, 12), stored, max_size=8)


@given(checkpoints, checkpoints, keeps, keeps, st.none() | st.integers(0, 12))
def test_it_ends_and_nothing_is_lost(
    root: dict[int, CheckpointInfo],
    mirror: dict[int, CheckpointInfo],
    keep: sw.Keep,
    mirror_keep: sw.Keep,
    newest: int | None,
) -> None:
    """Copies and removals, one after the other, reach a state in which there is nothing to do."""
    before = dict(root)
    for step in root.keys() & mirror.keys():
        if root[step].save_id == mirror[step].save_id:
            mirror[step] = root[step]  # the same save has the same time and metrics
    for _ in range(40):
        plan = decide_tiers(root, mirror, keep, mirror_keep, newest)
        assert not set(plan.remove_from_root) & set(plan.copy)
        for step in plan.remove_from_root:
            wanted = step in mirror_keep.steps_to_keep(
                {s: each for s, each in {**mirror, **root}.items() if s <= (newest or 0)}
            )
            assert not wanted or mirror[step].save_id == root[step].save_id
        root = {s: each for s, each in root.items() if s not in plan.remove_from_root}
        had = bool(mirror)
        mirror = {s: each for s, each in mirror.items() if s not in plan.remove_from_mirror}
        assert mirror or not had
        if not plan.copy:
            break
        mirror = {**mirror, plan.copy[0]: root[plan.copy[0]]}
    plan = decide_tiers(root, mirror, keep, mirror_keep, newest)
    assert plan == TierPlan(copy=(), remove_from_root=(), remove_from_mirror=(), pinned=())
    if before:
        last = max((s for s in before if newest is None or s <= newest), default=None)
        assert last is None or last in root
