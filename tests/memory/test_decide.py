"""What an agent decides: tables, and histories of many saves, without files or processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory import decide
from shardwise.parts.memory.decide import (
    ABANDONED,
    FINISH_FREEING,
    FOLLOW,
    FREE,
    FREE_RUN,
    LOOK_UP_ROOT,
    RESCUE,
    ROOT_TASK,
    Action,
    RunAction,
    decide_run,
    find_superseded,
    kept_snapshots,
)
from shardwise.parts.memory.home import ABANDONED_MARKER, Run, SnapshotDirectory
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart
from shardwise.parts.memory.times import DAY, UNTIL_FREED_IF_STORED, UNTIL_UNFOLLOWED
from shardwise.parts.memory.view import RootView, RunView, SnapshotView, StageState
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples

RUN = Run(Path("/nowhere/0123456789abcdef"))
STAGES = (*decide.STAGES_WITH_WORK, "rescue")


def snapshot(
    step: int,
    *,
    number: int | None = None,
    asked: tuple[str, ...] = ("commit", "protect"),
    durable: bool = False,
    rescue: bool = True,
    leads: bool = True,
    slots: int = 2,
    epoch: int = 0,
    committed: bool = True,
    has_file: bool = True,
    **states: StageState,
) -> SnapshotView:
    """A save with one rank's file; stages that are not given were not asked for.

    A step may be saved several times; each save has a number, and later saves have larger ones.
    """
    number = step if number is None else number
    save_id = f"{number:016x}"
    entry = FileEntry(f"r00000-{save_id}.safetensors", 0, 0, 0, 0, 0, 0)
    pending = PendingManifest(
        save_id=save_id,
        step=step,
        manifest="",
        files=[],
        nodes=[],
        leader="here",
        epoch=epoch,
        saved_at=float(number),
        durable=durable,
        rescue=rescue,
        storage=StorageTask(root=""),
    )
    sealed = states.get("seal", StageState.DONE) is StageState.DONE
    return SnapshotView(
        place=SnapshotDirectory(RUN, step, save_id),
        names=frozenset({MANIFEST} if committed else ()) | ({entry.name} if has_file else set()),
        parts=(
            RankPart(
                file=entry if has_file else None,
                snapshots_to_keep=slots,
                stages=asked,
                epoch=epoch,
            ),
        ),
        unsealed=() if sealed else (entry.name,),
        pending=pending,
        leads=leads,
        stages={stage: states.get(stage, StageState.NOT_REQUESTED) for stage in STAGES},
        staged_at=0.0,
    )


def run_of(*snapshots: SnapshotView, **more: object) -> RunView:
    return replace(RunView(run=RUN, snapshots=snapshots), **more)  # type: ignore[arg-type]


def freed(run: RunView, now: float = 0.0) -> list[int]:
    return [a.place.step for a in decide_run(run, now) if a.kind == FREE]


@pytest.mark.parametrize("stage", decide.STAGES_WITH_WORK)
@pytest.mark.parametrize("state", StageState)
def test_only_stages_that_run_have_an_action(stage: str, state: StageState) -> None:
    run = run_of(snapshot(1, **{stage: state}))
    assert [each.kind for each in decide_run(run, 0.0)] == [stage] * (state is StageState.RUNNING)


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_becomes_of_a_snapshot_that_is_abandoned(stage: str) -> None:
    found = snapshot(1, **{stage: StageState.RUNNING})
    found = replace(found, names=found.names | {ABANDONED_MARKER})
    for seconds in (None, 0.0):
        run = run_of(found, lost_ranks=(0,), unattended_since=seconds)
        expected = [Action(FREE, found.place, why=ABANDONED)]
        assert [each for each in decide_run(run, 0.0) if each.kind != FREE_RUN] == expected


DONE, WAITING = StageState.DONE, StageState.WAITING
ASKED = ("commit", "protect", "persist")
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
    run = run_of(*(snapshot(n, slots=slots, **each) for n, each in enumerate(states, 1)))
    assert freed(run) == expected


def test_one_that_was_never_committed_goes_when_a_newer_one_is() -> None:
    first = snapshot(1, commit=WAITING, protect=WAITING, committed=False)
    assert freed(run_of(first)) == []
    assert freed(run_of(first, snapshot(2, **COMMITTED))) == []
    assert freed(run_of(first, snapshot(2, **PROTECTED))) == [1]


@pytest.mark.parametrize(("seconds", "is_freed"), [(120.0, False), (122.0, True)])
def test_one_whose_commit_takes_long_goes_while_a_rank_waits_for_its_slot(
    seconds: float, is_freed: bool
) -> None:
    """The directory of the rank's save exists, and nothing is staged there."""
    first, second, third = (
        snapshot(n, commit=WAITING, protect=WAITING, committed=False, has_file=n < 3)
        for n in (1, 2, 3)
    )
    second = replace(second, seconds_staged=seconds)
    for run in (run_of(first, second), run_of(first, second, third)):
        found = [Action(FREE, first.place, decide.UNCOMMITTABLE)] if is_freed else []
        assert decide_run(run, 0.0) == found
    assert freed(run_of(replace(first, seconds_staged=seconds), third)) == []


@pytest.mark.parametrize(
    ("seconds", "slots", "expected"), [(120.0, 2, []), (122.0, 2, [3]), (122.0, 3, [])]
)
def test_the_newest_goes_only_if_its_commit_takes_long_and_all_slots_are_in_use(
    seconds: float, slots: int, expected: list[int]
) -> None:
    """The node that leads it has never heard of it, and ranks wait for its slot."""
    kept = [snapshot(step, slots=slots, **PROTECTED) for step in (1, 2)]
    late = snapshot(3, slots=slots, commit=WAITING, protect=WAITING, committed=False)
    late = replace(late, seconds_staged=seconds)
    begun = snapshot(4, commit=WAITING, protect=WAITING, committed=False, has_file=False)
    assert freed(run_of(*kept, late)) == []
    assert freed(run_of(*kept, late, begun)) == expected
    two_ranks = replace(late, parts=late.parts * 2)
    assert freed(run_of(*kept, two_ranks, begun)) == []


def test_one_whose_commit_has_failed_goes_once_all_ranks_of_the_node_have_begun_another() -> None:
    """Otherwise, no rank would ever get a slot again: the older ones stay as they are committed."""
    kept = [snapshot(step, slots=2, **PROTECTED) for step in (1, 2)]
    failed = snapshot(3, commit=StageState.FAILED, protect=StageState.FAILED, committed=False)
    begun = snapshot(4, commit=WAITING, protect=WAITING, committed=False, has_file=False)
    assert freed(run_of(*kept, failed)) == []
    assert freed(run_of(*kept, failed, begun)) == [3]
    two_ranks = replace(failed, parts=failed.parts * 2)
    assert freed(run_of(*kept, two_ranks, begun)) == []
    assert freed(run_of(*kept, two_ranks, replace(begun, parts=begun.parts * 2))) == [3]


def test_what_was_promised_to_storage_stays_until_it_is_there() -> None:
    asked = ("commit", "protect", "persist")
    newer = [snapshot(n, asked=asked, persist=DONE, **PROTECTED) for n in (2, 3, 4)]
    for leads, state, expected in (
        (True, StageState.RUNNING, [2, 3]),
        (True, DONE, [1, 2]),
        (True, StageState.FAILED, [1, 2]),
        (False, WAITING, [1, 2]),
    ):
        old = snapshot(1, asked=asked, durable=True, leads=leads, persist=state, **PROTECTED)
        assert freed(run_of(old, *newer)) == expected


def test_a_promised_save_without_data_files_stays_too() -> None:
    newer = [snapshot(n, **PROTECTED) for n in (2, 3)]
    old = snapshot(1, durable=True, has_file=False, persist=StageState.RUNNING, **PROTECTED)
    for each in (old, replace(old, parts=())):
        assert freed(run_of(each, *newer)) == [2]
        left = replace(each, names=each.names | {ABANDONED_MARKER})
        assert freed(run_of(left, *newer)) == [1]


def freed_saves(*snapshots: SnapshotView) -> list[str]:
    """The ids of the saves that are freed, oldest first."""
    return [each.place.save_id for each in decide_run(run_of(*snapshots), 0.0) if each.kind == FREE]


def test_an_older_save_of_a_step_goes_once_its_stages_have_ended_for_a_newer_one() -> None:
    old = snapshot(1, number=1, commit=WAITING, protect=WAITING, committed=False)
    unsaved = snapshot(1, number=2, commit=WAITING, protect=WAITING, committed=False)
    assert freed_saves(old) == []
    assert freed_saves(old, unsaved) == []
    assert freed_saves(old, snapshot(1, number=2, **COMMITTED)) == []
    assert freed_saves(old, snapshot(1, number=2, **PROTECTED)) == [old.place.save_id]
    failed = snapshot(1, number=1, commit=StageState.FAILED, protect=StageState.FAILED)
    failed = replace(failed, names=failed.names - {MANIFEST})
    assert freed_saves(failed, snapshot(1, number=2, **COMMITTED)) == [old.place.save_id]
    assert freed_saves(failed, unsaved) == [old.place.save_id]


def test_an_older_save_of_a_step_uses_no_slot_that_an_older_step_could_use() -> None:
    older, first, second, newest = (
        snapshot(step, number=number, slots=3, **PROTECTED)
        for number, step in enumerate((1, 2, 2, 3))
    )
    assert freed_saves(older, first, second, newest) == [first.place.save_id]
    waiting = snapshot(2, number=1, slots=3, durable=True, persist=StageState.RUNNING, **PROTECTED)
    assert freed_saves(older, waiting, second, newest) == [older.place.save_id]


def test_a_failed_save_of_a_step_leaves_the_earlier_one_in_place() -> None:
    earlier = snapshot(1, number=1, **PROTECTED)
    failed = snapshot(1, number=2, commit=StageState.FAILED, committed=False)
    assert freed_saves(earlier, failed) == []
    assert kept_snapshots(run_of(earlier, failed)) == {earlier.place}


@pytest.mark.parametrize("durable", [True, False])
def test_a_restore_of_a_step_that_was_saved_twice_keeps_what_it_can_be_restored_from(
    durable: bool,
) -> None:
    """Without a manifest here, another node may have it, and this node a part of the snapshot."""
    first, second = (
        snapshot(2, number=n, asked=ASKED, durable=durable, commit=WAITING, committed=False)
        for n in (1, 2)
    )
    committed = replace(first, names=first.names | {MANIFEST})
    newer = replace(second, names=second.names | {MANIFEST})
    for snapshots, expected in (
        ((committed, second), [second.place]),
        ((first, newer), [first.place]),
        ((first, second), []),
        ((committed, newer), []),
        ((first,), []),
    ):
        run = run_of(*snapshots)
        assert find_superseded(run, 2, Lineage(RUN.name), ["here"], 1) == expected


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
    states = {**PROTECTED, "rescue": state}
    one = snapshot(1, durable=durable, rescue=rescue, committed=committed)
    one = replace(one, stages={**one.stages, **states})
    run = run_of(one, lost_ranks=(3,))
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
        (DAY, root(None, is_reachable=False), [1, 2]),
        (1.0, root(None, lineage=Lineage(RUN.name).after_resuming(1)), [2]),
    ],
)
def test_a_run_without_trainers_gives_its_memory_back(
    idle: float, root: RootView, expected: list[int] | str
) -> None:
    run = run_of(*(snapshot(n, **PROTECTED) for n in (1, 2)), unattended_since=0.0, root=root)
    actions = decide_run(run, idle)
    assert freed(run, idle) == ([] if expected == "rescue" else expected)
    assert [each.why for each in actions if each.kind == RESCUE] == (
        [decide.RUN_ENDED] if expected == "rescue" else []
    )


def test_the_root_of_a_run_without_trainers_is_read_now_and_then() -> None:
    run = run_of(snapshot(1, **PROTECTED), unattended_since=100.0)
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


def test_the_task_in_the_root_is_worked_on_with_and_without_trainers() -> None:
    run = run_of(snapshot(1, **PROTECTED), task_changed_at=5)
    assert decide_run(run, 0.0) == [RunAction(ROOT_TASK, RUN, task=5)]
    run = replace(run, snapshots=(), unattended_since=0.0)
    assert decide_run(run, 0.0) == [RunAction(ROOT_TASK, RUN, task=5)]


def test_what_was_being_freed_is_freed_to_the_end() -> None:
    run = run_of(snapshot(1, **PROTECTED), has_freed=True)
    assert decide_run(run, 0.0) == [RunAction(FINISH_FREEING, RUN)]


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("copying", [True, False])
@pytest.mark.parametrize(("states", "ends"), [(COMMITTED, False), (PROTECTED, True)])
def test_nodes_above_are_asked_only_while_a_stage_is_open(
    above: bool, copying: bool, states: dict[str, StageState], ends: bool
) -> None:
    """They are the first to know how a stage has ended."""
    one = snapshot(1, leads=False, **states)
    parts = [replace_struct(each, above=[AgentInfo("a", "", "")] * above) for each in one.parts]
    one = replace(one, parts=tuple(parts), is_copying=copying)
    expected = [RunAction(FOLLOW, RUN, newest=one.place.name)] * (above and (copying or not ends))
    assert decide_run(run_of(one), 0.0) == expected
    left = replace(one, names=one.names | {ABANDONED_MARKER})
    assert [each.kind for each in decide_run(run_of(left), 0.0)] == [FREE]


def test_nodes_above_are_not_asked_once_a_run_has_had_no_trainer_for_long() -> None:
    one = snapshot(1, leads=False, commit=DONE, protect=WAITING)
    parts = [replace_struct(each, above=[AgentInfo("a", "", "")]) for each in one.parts]
    run = run_of(replace(one, parts=tuple(parts)), unattended_since=0.0)
    for seconds, follows in ((UNTIL_UNFOLLOWED - 1, True), (UNTIL_UNFOLLOWED, False)):
        actions = decide_run(run, seconds)
        assert (RunAction(FOLLOW, RUN, newest=one.place.name) in actions) == follows


def test_a_node_that_leads_now_does_not_ask_the_nodes_that_were_above_it() -> None:
    """They would answer with their copy of its own pending manifest, which has no manifest."""
    before = snapshot(1, leads=False, commit=DONE, protect=DONE)
    parts = [replace_struct(each, above=[AgentInfo("a", "", "")]) for each in before.parts]
    before = replace(before, parts=tuple(parts))
    begun = replace(snapshot(2, leads=False, committed=False, commit=WAITING), pending=None)
    for copying in (True, False):
        assert decide_run(run_of(before, replace(begun, is_copying=copying)), 0.0) == []


def test_the_last_save_of_a_run_is_not_rescued_as_well() -> None:
    """Its ranks have requested to persist it; only the leader's pending manifest says so too."""
    for asked, count in ((("commit", "protect"), 1), (ASKED, 0)):
        last = snapshot(1, asked=asked, leads=False, **PROTECTED)
        actions = decide_run(run_of(last, lost_ranks=(0,)), 0.0)
        assert [each.kind for each in actions].count(RESCUE) == count


def test_a_rescued_save_stays_until_it_or_a_newer_one_is_persisted() -> None:
    """Its ranks have not requested to persist it, so no record of theirs says that it is."""
    newer = [snapshot(step, **PROTECTED) for step in (2, 3, 4)]
    for persist, freed_steps in ((StageState.RUNNING, [2, 3]), (DONE, [1, 2])):
        rescued = snapshot(1, **PROTECTED, persist=persist)
        assert freed(run_of(rescued, *newer)) == freed_steps
    stored = replace(newer[-1], stages={**newer[-1].stages, "persist": DONE})
    rescued = snapshot(1, **PROTECTED, persist=StageState.RUNNING)
    assert 1 in freed(run_of(rescued, *newer[:-1], stored))


# Histories: saves are made, fail and end in any order, and the agent does what it decides.


@dataclass
class History:
    """A run of one node whose agent does all that it decides, one action at a time."""

    snapshots: dict[SnapshotDirectory, SnapshotView] = field(default_factory=dict)
    persisted: set[SnapshotDirectory] = field(default_factory=set)
    step: int = 0
    number: int = 0
    epoch: int = 0
    lineage: Lineage = field(default_factory=lambda: Lineage(RUN.name))

    def view(self) -> RunView:
        return run_of(*sorted(self.snapshots.values(), key=lambda each: each.age_key))

    def stage(self, slots: int, durable: bool, *, again: bool) -> None:
        """A rank stages a step, or the last step again."""
        self.number += 1
        self.step += not again
        new = snapshot(
            self.step,
            number=self.number,
            asked=ASKED if durable else ASKED[:2],
            durable=durable,
            slots=slots,
            epoch=self.epoch,
            seal=StageState.RUNNING,
            commit=StageState.RUNNING,
            protect=WAITING,
            persist=StageState.RUNNING if durable else StageState.NOT_REQUESTED,
            committed=False,
        )
        self.snapshots[new.place] = new

    def resume(self, step: int) -> None:
        """The run goes back to a step: what is newer is discarded by its trainers."""
        for place in find_superseded(self.view(), step, self.lineage, ["here"], 2):
            del self.snapshots[place]
        self.lineage = self.lineage.after_resuming(step)
        self.epoch = self.lineage.epoch

    def do(self, action: decide.AnyAction, fails: bool) -> None:
        """An action ends, well or not."""
        assert isinstance(action, Action)
        if action.kind == FREE:
            del self.snapshots[action.place]
            return
        found, name = self.snapshots[action.place], action.kind
        ends = StageState.FAILED if fails and name != "seal" else DONE
        stages = {**found.stages, name: ends}
        names = found.names
        if name == "commit" and ends is DONE:
            stages["protect"] = StageState.RUNNING
            names |= {MANIFEST}
        if name == "persist":
            self.persisted.add(found.place)
        unsealed = () if name == "seal" else found.unsealed
        self.snapshots[found.place] = replace(found, stages=stages, unsealed=unsealed, names=names)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["stage", "stage", "again", "do", "do", "do", "resume"]),
        st.integers(0, 30),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=60,
)


def check(history: History, actions: Iterable[decide.AnyAction]) -> None:
    """What must hold whatever has happened."""
    run = history.view()
    going = {each.place for each in actions if isinstance(each, Action) and each.kind == FREE}
    if (newest := run.newest_committed) is not None:
        assert newest.place not in going
    committed = [each for each in run.snapshots if each.is_committed]
    protected = [each.place for each in committed if each.state_of("protect") is DONE]
    assert not protected or protected[-1] not in going
    assert not {each.place for each in run.snapshots if each.must_be_persisted} & going
    assert not kept_snapshots(run) & going


@examples(150, deadline=None)
@given(EVENTS)
def test_histories_keep_what_they_must_and_come_to_rest(
    events: list[tuple[str, int, int, bool]],
) -> None:
    history = History()
    for kind, number, slots, flag in events:
        actions = decide_run(history.view(), 0.0)
        check(history, actions)
        if kind in ("stage", "again"):
            history.stage(slots, flag, again=kind == "again")
        elif kind == "resume" and history.snapshots:
            steps = sorted(each.step for each in history.snapshots)
            back = steps[number % len(steps)]
            history.resume(back)
            assert all(each.step <= back for each in history.snapshots)
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
        assert not each.must_be_persisted
        assert each.state_of("seal") is DONE


@examples(50, deadline=None)
@given(EVENTS)
def test_a_history_that_is_seen_twice_is_decided_alike(
    events: list[tuple[str, int, int, bool]],
) -> None:
    history = History()
    for kind, number, slots, flag in events:
        actions = decide_run(history.view(), 0.0)
        assert actions == decide_run(history.view(), 0.0)
        assert len(actions) == len(set(actions))
        if kind in ("stage", "again"):
            history.stage(slots, flag, again=kind == "again")
        elif actions:
            history.do(actions[number % len(actions)], flag)
