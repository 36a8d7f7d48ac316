"""What an agent decides: tables, and histories of many saves, without files or processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry
from shardwise.parts.memory import decide
from shardwise.parts.memory.decide import (
    FREE,
    FREE_RUN,
    LOOK_UP_ROOT,
    MIRROR,
    RESCUE,
    UNTIL_FREED,
    UNTIL_FREED_IF_STORED,
    Action,
    RunAction,
    decide_run,
    find_superseded,
    kept_steps,
)
from shardwise.parts.memory.home import ABANDONED_MARKER, Run, SnapshotDirectory
from shardwise.parts.memory.lineage import Lineage
from shardwise.parts.memory.records import REMOVE_OLD, PendingManifest, StagedFile
from shardwise.parts.memory.view import RootView, RunView, SaveView, SnapshotView, Stage, StageState
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples

RUN = Run(Path("/nowhere/0123456789abcdef"))
STAGES = (*decide.STAGES_WITH_WORK, "rescue")


def save_id_in_name(step: int) -> str:
    return f"{step:016x}"


def save(
    step: int,
    *,
    asked: tuple[str, ...] = ("commit", "protect"),
    durable: bool = False,
    rescue: bool = True,
    leads: bool = True,
    slots: int = 2,
    epoch: int = 0,
    **states: StageState,
) -> SaveView:
    """One rank's file; stages that are not given were not asked for."""
    save_id = save_id_in_name(step)
    entry = FileEntry(f"r00000-{save_id}.safetensors", 0, 0, 0, 0, 0, 0)
    pending = PendingManifest(
        save_id=save_id,
        step=step,
        manifest="",
        files=[],
        nodes=[],
        leader="here",
        epoch=epoch,
        durable=durable,
        rescue=rescue,
        storage=StorageTask(root=""),
    )
    sealed = states.get("seal", StageState.DONE) is StageState.DONE
    return SaveView(
        save_id=save_id,
        staged=(StagedFile(entry, f"r00000-{step}.slot", slots, asked, epoch),),
        unsealed=() if sealed else (entry.name,),
        has_staged=True,
        pending=pending,
        has_pending_manifest=leads,
        epoch=epoch,
        stages={stage: Stage(states.get(stage, StageState.NOT_REQUESTED)) for stage in STAGES},
    )


def snapshot(step: int, *saves: SaveView, committed: bool = True) -> SnapshotView:
    return SnapshotView(
        place=SnapshotDirectory(RUN, step),
        names=frozenset({MANIFEST} if committed else {"r"}),
        saves={each.save_id: each for each in saves},
        committed_save=saves[0].save_id if committed else None,
        staged_at=0.0,
    )


def run_of(*snapshots: SnapshotView, **more: object) -> RunView:
    return replace(RunView(run=RUN, snapshots=snapshots), **more)  # type: ignore[arg-type]


def freed(run: RunView, now: float = 0.0) -> list[int]:
    return [a.place.step for a in decide_run(run, now) if a.kind == FREE and not a.names]


@pytest.mark.parametrize("stage", decide.STAGES_WITH_WORK)
@pytest.mark.parametrize("state", StageState)
def test_only_stages_that_run_have_an_action(stage: str, state: StageState) -> None:
    run = run_of(snapshot(1, save(1, **{stage: state})))
    assert [each.kind for each in decide_run(run, 0.0)] == [stage] * (state is StageState.RUNNING)


@pytest.mark.parametrize("stage", [each for each in STAGES if each != REMOVE_OLD])
def test_nothing_becomes_of_a_snapshot_that_is_abandoned(stage: str) -> None:
    found = snapshot(1, save(1, **{stage: StageState.RUNNING}))
    found = replace(found, names=found.names | {ABANDONED_MARKER})
    assert decide_run(run_of(found, lost_ranks=(0,)), 0.0) == []


DONE, WAITING = StageState.DONE, StageState.WAITING
PROTECTED = {"commit": DONE, "protect": DONE}
COMMITTED = {"commit": DONE, "protect": WAITING}


@pytest.mark.parametrize(
    ("states", "slots", "expected"),
    [
        ([PROTECTED, PROTECTED, PROTECTED], 2, [1]),
        ([PROTECTED, PROTECTED, PROTECTED], 1, [1, 2]),
        ([PROTECTED, PROTECTED, PROTECTED], 3, []),
        ([PROTECTED, COMMITTED, COMMITTED], 2, []),  # what waits is pinned
        ([PROTECTED, COMMITTED, PROTECTED], 2, [1]),  # a newer one has done what it waits for
        ([PROTECTED, PROTECTED, COMMITTED], 1, [1]),
    ],
)
def test_what_newer_snapshots_have_replaced_is_freed(
    states: list[dict[str, StageState]], slots: int, expected: list[int]
) -> None:
    run = run_of(*(snapshot(n, save(n, slots=slots, **each)) for n, each in enumerate(states, 1)))
    assert freed(run) == expected


def test_one_that_was_never_committed_goes_when_a_newer_one_is() -> None:
    first = snapshot(1, save(1, commit=WAITING, protect=WAITING), committed=False)
    assert freed(run_of(first)) == []
    assert freed(run_of(first, snapshot(2, save(2, **COMMITTED)))) == []
    assert freed(run_of(first, snapshot(2, save(2, **PROTECTED)))) == [1]


def test_what_was_promised_to_storage_stays_until_it_is_there() -> None:
    asked = ("commit", "protect", "persist")
    newer = [snapshot(n, save(n, asked=asked, persist=DONE, **PROTECTED)) for n in (2, 3, 4)]
    for leads, state, expected in (
        (True, StageState.RUNNING, [2, 3]),
        (True, DONE, [1, 2]),
        (True, StageState.FAILED, [1, 2]),
        (False, WAITING, [1, 2]),
    ):
        old = save(1, asked=asked, durable=True, leads=leads, persist=state, **PROTECTED)
        assert freed(run_of(snapshot(1, old), *newer)) == expected


def test_a_promised_save_without_data_files_stays_too() -> None:
    newer = [snapshot(n, save(n, **PROTECTED)) for n in (2, 3)]
    old = replace(save(1, durable=True, persist=StageState.RUNNING, **PROTECTED), staged=())
    assert freed(run_of(snapshot(1, old), *newer)) == [2]
    left = snapshot(1, old)
    left = replace(left, names=left.names | {ABANDONED_MARKER})
    assert freed(run_of(left, *newer)) == [1]


def test_an_older_save_of_a_step_goes_once_its_commit_has_ended() -> None:
    new = save(1, **PROTECTED)
    for state, expected in ((WAITING, []), (StageState.FAILED, [("f" * 16,)])):
        old = replace(save(1, commit=state), save_id="f" * 16)
        actions = decide_run(run_of(snapshot(1, new, old)), 0.0)
        assert [each.names for each in actions if each.kind == FREE] == expected


@pytest.mark.parametrize(
    ("durable", "rescue", "called", "committed", "expected"),
    [
        (False, True, False, True, True),
        (False, True, True, True, False),
        (False, False, False, True, False),
        (True, True, False, True, False),
        (False, True, False, False, False),
    ],
)
def test_the_newest_is_rescued_when_a_trainer_is_lost(
    durable: bool, rescue: bool, called: bool, committed: bool, expected: bool
) -> None:
    state = DONE if called else StageState.NOT_REQUESTED
    one = replace(
        save(1, durable=durable, rescue=rescue, **PROTECTED),
        stages={**save(1, **PROTECTED).stages, "rescue": Stage(state)},
    )
    run = run_of(snapshot(1, one, committed=committed), lost_ranks=(3,))
    assert [each.kind for each in decide_run(run, 0.0)] == [RESCUE] * expected
    assert not decide_run(replace(run, lost_ranks=()), 0.0)


def root(
    newest_step: int | None, *, lineage: Lineage | None = None, is_reachable: bool = True
) -> RootView:
    return RootView(
        read_at=1e9,
        is_reachable=is_reachable,
        lineage=lineage or Lineage(RUN.name),
        newest_step=newest_step,
        has_read_steps=True,
    )


@pytest.mark.parametrize(
    ("idle", "root", "expected"),
    [
        (UNTIL_FREED_IF_STORED - 1, root(9), []),
        (UNTIL_FREED_IF_STORED, root(9), [1, 2]),
        (UNTIL_FREED_IF_STORED, root(1), "rescue"),
        (UNTIL_FREED_IF_STORED, root(None), "rescue"),
        (UNTIL_FREED_IF_STORED, replace(root(None), lineage=None), [1, 2]),
        (UNTIL_FREED_IF_STORED, root(9, is_reachable=False), []),
        (UNTIL_FREED, root(None, is_reachable=False), [1, 2]),
        (1.0, root(None, lineage=Lineage(RUN.name).after_resuming(1)), [2]),
    ],
)
def test_a_run_without_trainers_gives_its_memory_back(
    idle: float, root: RootView, expected: list[int] | str
) -> None:
    run = run_of(
        *(snapshot(n, save(n, **PROTECTED)) for n in (1, 2)), unattended_since=0.0, root=root
    )
    actions = decide_run(run, idle)
    assert freed(run, idle) == ([] if expected == "rescue" else expected)
    assert [each.why for each in actions if each.kind == RESCUE] == (
        [decide.RUN_ENDED] if expected == "rescue" else []
    )


def test_the_root_of_a_run_without_trainers_is_read_now_and_then() -> None:
    run = run_of(snapshot(1, save(1, **PROTECTED)), unattended_since=100.0)
    assert not decide_run(run, 109.0)
    assert decide_run(run, 110.0) == [RunAction(LOOK_UP_ROOT, RUN, False)]
    looked = replace(run, root=RootView(read_at=110.0))
    assert not decide_run(looked, 119.0)
    assert decide_run(looked, 120.0) == [RunAction(LOOK_UP_ROOT, RUN, False)]
    assert RunAction(LOOK_UP_ROOT, RUN, True) in decide_run(looked, 100.0 + UNTIL_FREED_IF_STORED)


def test_a_run_of_which_nothing_is_left_is_removed_a_little_later() -> None:
    run = run_of(unattended_since=50.0)
    assert not decide_run(run, 59.0)
    assert decide_run(run, 60.0) == [RunAction(FREE_RUN, RUN)]


def test_a_mirror_is_kept_up_to_date_with_and_without_trainers() -> None:
    run = run_of(snapshot(1, save(1, **PROTECTED)), mirror_changed_at=5)
    assert decide_run(run, 0.0) == [RunAction(MIRROR, RUN, task=5)]
    run = replace(run, snapshots=(), unattended_since=0.0)
    assert decide_run(run, 0.0) == [RunAction(MIRROR, RUN, task=5)]


# Histories: saves are made, fail and end in any order, and the agent does what it decides.

ASKED = ("commit", "protect", "persist")


@dataclass
class History:
    """A run of one node whose agent does all that it decides, one action at a time."""

    snapshots: dict[int, SnapshotView] = field(default_factory=dict)
    persisted: set[int] = field(default_factory=set)
    epoch: int = 0
    lineage: Lineage = field(default_factory=lambda: Lineage(RUN.name))

    def view(self) -> RunView:
        return run_of(*(self.snapshots[step] for step in sorted(self.snapshots)))

    def stage(self, step: int, slots: int, durable: bool) -> None:
        """A rank stages a step."""
        new = save(
            step,
            asked=ASKED if durable else ASKED[:2],
            durable=durable,
            slots=slots,
            epoch=self.epoch,
            seal=StageState.RUNNING,
            commit=StageState.RUNNING,
            protect=WAITING,
            persist=StageState.RUNNING if durable else StageState.NOT_REQUESTED,
        )
        self.snapshots[step] = snapshot(step, new, committed=False)

    def resume(self, step: int) -> None:
        """The run goes back to a step: what is newer is discarded by its trainers."""
        for place in find_superseded(self.view(), step, self.lineage, ["here"], 2):
            del self.snapshots[place.step]
        self.lineage = self.lineage.after_resuming(step)
        self.epoch = self.lineage.epoch

    def do(self, action: Action, fails: bool) -> None:
        """An action ends, well or not."""
        if action.kind == FREE:
            del self.snapshots[action.place.step]
            return
        assert isinstance(action, Action)
        found = self.snapshots[action.place.step]
        (one,) = found.saves.values()
        stages = dict(one.stages)
        name = action.kind
        ends = StageState.FAILED if fails and name != "seal" else DONE
        stages[name] = Stage(ends)
        if name == "commit" and ends is DONE:
            stages["protect"] = Stage(StageState.RUNNING)
        if name == "persist":
            self.persisted.add(found.step)
        unsealed = () if name == "seal" else one.unsealed
        one = replace(one, stages=stages, unsealed=unsealed)
        committed = one.save_id if name == "commit" and ends is DONE else found.committed_save
        self.snapshots[found.step] = replace(
            found, saves={one.save_id: one}, committed_save=committed
        )


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stage", "stage", "do", "do", "do", "resume"]),
        st.integers(0, 30),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=60,
)


def check(history: History, actions: Iterable[Action]) -> None:
    """What must hold whatever has happened."""
    run = history.view()
    going = {each.place.step for each in actions if each.kind == FREE}
    if (newest := run.newest_committed) is not None:
        assert newest.step not in going
    protected = [
        each.step for each in run.snapshots if each.is_committed and each.is_done("protect")
    ]
    assert not protected or protected[-1] not in going
    promised = {
        each.step for each in run.snapshots if any(s.must_be_persisted for s in each.saves.values())
    }
    assert not promised & going
    assert not kept_steps(run) & going


@examples(150, deadline=None)
@given(EVENTS)
def test_histories_keep_what_they_must_and_come_to_rest(
    events: list[tuple[str, int, int, bool]],
) -> None:
    history, step = History(), 0
    for kind, number, slots, flag in events:
        actions = decide_run(history.view(), 0.0)
        check(history, actions)
        if kind == "stage":
            step += 1
            history.stage(step, slots, flag)
        elif kind == "resume" and history.snapshots:
            back = sorted(history.snapshots)[number % len(history.snapshots)]
            history.resume(back)
            assert all(each <= back for each in history.snapshots)
        elif kind == "do" and actions:
            history.do(actions[number % len(actions)], flag)
    for _ in range(1000):
        actions = decide_run(history.view(), 0.0)
        check(history, actions)
        if not actions:
            break
        history.do(actions[0], False)
    assert not decide_run(history.view(), 0.0), "it does not come to rest"
    for each in history.view().snapshots:
        for one in each.saves.values():
            assert not one.must_be_persisted
            assert one.state_of("seal") is DONE


@examples(50, deadline=None)
@given(EVENTS)
def test_a_history_that_is_seen_twice_is_decided_alike(
    events: list[tuple[str, int, int, bool]],
) -> None:
    history, step = History(), 0
    for kind, number, slots, flag in events:
        actions = decide_run(history.view(), 0.0)
        assert actions == decide_run(history.view(), 0.0)
        assert len(actions) == len(set(actions))
        if kind == "stage":
            step += 1
            history.stage(step, slots, flag)
        elif actions:
            history.do(actions[number % len(actions)], flag)
