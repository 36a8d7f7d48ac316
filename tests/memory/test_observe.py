"""What an agent sees of a snapshot: when there is work, and what is damaged."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.agent.protect import claim_ring_file
from shardwise.parts.memory.decide import Action, decide_run
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import PERSIST_MARKER, Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import read_run_view, read_snapshot
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RankPart,
    RingFile,
    SaveState,
    StageOutcome,
)
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import RecordCache, SaveStates, read_state
from shardwise.parts.memory.view import RunView, StageState, on_this_node
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import agent_in_threads, free_now
from tests.memory.test_nodes import unreachable
from tests.memory.test_server import TOKEN
from tests.memory.test_snapshots import shm
from tests.tools.agents import until

# What an agent sees of a snapshot: when there is work to do, and when it has to wait.

SAVE = "0" * 16
FILES = [f"r{rank:05d}-{SAVE}.safetensors" for rank in (0, 1)]


def place_of(run: Run, step: int = 1, save_id: str = SAVE) -> SnapshotDirectory:
    """The directory of a save, which is made."""
    place = SnapshotDirectory(run, step, save_id)
    place.path.mkdir(parents=True)
    return place


def part_of(place: SnapshotDirectory, rank: int) -> RankPart:
    """The record of a rank with an empty file."""
    entry = FileEntry(f"r{rank:05d}-{place.save_id}.safetensors", rank, 0, 0, 0, 0, 0)
    return RankPart(file=entry, snapshots_to_keep=2, stages=("commit", "protect"), epoch=0)


@pytest.fixture
def begun(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot of a node with two ranks: the first has staged, and the second copies."""
    place = place_of(Home(tmp_path).run(new_run_id()))
    begin(place, 0)
    begin(place, 1)
    (place.path / FILES[0]).touch()
    return place


def begin(place: SnapshotDirectory, rank: int) -> None:
    """A rank begins to copy."""
    write_record(place.path / records.rank_record(rank), part_of(place, rank))


def due(place: SnapshotDirectory) -> tuple[StageState, StageState]:
    """Whether checksums are taken, and files are copied to storage, which another node requests."""
    found = read_snapshot(place, requested=("persist",))
    return found.state_of("seal"), found.state_of(on_this_node("persist"))


def test_only_checksums_wait_while_another_rank_copies(begun: SnapshotDirectory) -> None:
    lock = RankLock(begun.run, 1)
    assert due(begun) == (StageState.WAITING, StageState.RUNNING)
    (begun.path / FILES[1]).touch()
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def test_a_rank_that_has_failed_to_copy_is_not_waited_for(begun: SnapshotDirectory) -> None:
    lock = RankLock(begun.run, 1)
    failed = msgspec.structs.replace(part_of(begun, 1), failure="no memory is left")
    write_record(begun.path / records.rank_record(1), failed)
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def test_a_record_without_its_file_is_nothing_to_do(begun: SnapshotDirectory) -> None:
    """The trainer was killed before the file was complete."""
    (begun.path / FILES[0]).unlink()
    found = read_snapshot(begun)
    assert found.state_of("seal") is StageState.NOT_REQUESTED
    assert not found.staged
    assert not found.open_stages
    assert not found.is_copying
    assert [each.file and each.file.name for each in found.parts] == FILES


def test_a_rank_that_was_lost_as_it_copied_is_not_waited_for(begun: SnapshotDirectory) -> None:
    """The agent that leads would wait for this node's part, and rescue nothing meanwhile."""
    RankLock(begun.run, 1).release_as_lost()
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)


def test_a_rank_that_is_stuck_as_it_copies_is_not_waited_for_once_the_commit_has_failed(
    begun: SnapshotDirectory,
) -> None:
    lock = RankLock(begun.run, 1)
    SaveStates().end(begun, {"commit": StageOutcome(failure="stuck")})
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def pending_of(leader: str, *, durable: bool = False, saved_at: float = 0.0) -> PendingManifest:
    return PendingManifest(
        save_id=SAVE,
        step=1,
        manifest="{}",
        files=[],
        nodes=[],
        leader=leader,
        durable=durable,
        saved_at=saved_at,
        storage=StorageTask(root=""),
    )


@pytest.mark.parametrize("leads", [True, False])
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("commit", [None, "", "a node is lost"])
def test_the_stages_of_a_save(
    begun: SnapshotDirectory, leads: bool, durable: bool, called: bool, commit: str | None
) -> None:
    """On the node that leads it, and on another."""
    pending = pending_of("here" if leads else "there", durable=durable)
    write_record(begun.path / records.PENDING, pending)
    state = SaveState(rescue="here" if called else "")
    if commit is not None:
        state = msgspec.structs.replace(state, outcomes={"commit": StageOutcome(failure=commit)})
    write_record(begun.path / records.STATE, state)
    found = read_snapshot(begun, "here")
    assert found.leads == leads
    if commit is None:
        assert found.state_of("commit") is (StageState.RUNNING if leads else StageState.WAITING)
    else:
        assert found.state_of("commit") is (StageState.FAILED if commit else StageState.DONE)
    ready = leads and commit == ""
    if commit:
        assert found.state_of("protect") is StageState.FAILED  # it never begins
    else:
        assert found.state_of("protect") is (StageState.RUNNING if ready else StageState.WAITING)
    persists = (leads and durable) or called
    assert found.state_of("persist") is (
        StageState.RUNNING if persists else StageState.NOT_REQUESTED
    )
    assert found.state_of("rescue") is (StageState.DONE if called else StageState.NOT_REQUESTED)
    assert found.must_be_persisted == (leads and durable)


@pytest.mark.parametrize("leader", ["here", "there"])
def test_the_last_save_of_a_run_is_persisted_although_it_was_for_memory_only(
    begun: SnapshotDirectory, leader: str
) -> None:
    """Each node keeps its part until then, and the one that leads it persists it."""
    write_record(begun.path / records.PENDING, pending_of(leader))
    before = read_snapshot(begun, "here")
    assert not before.is_durable
    assert before.state_of("persist") is StageState.NOT_REQUESTED
    (begun.path / PERSIST_MARKER).touch()
    found = read_snapshot(begun, "here")
    assert found.is_durable
    assert found.must_be_persisted == (leader == "here")
    assert "persist" in found.open_stages
    expected = StageState.RUNNING if leader == "here" else StageState.WAITING
    assert found.state_of("persist") is expected
    SaveStates().end(begun, {"persist": StageOutcome()})
    assert "persist" not in read_snapshot(begun, "here").open_stages


def test_a_save_is_led_once_the_ranks_of_the_node_have_copied(begun: SnapshotDirectory) -> None:
    """To persist it begins before: each file is stored while it is copied."""
    lock = RankLock(begun.run, 1)
    write_record(begun.path / records.PENDING, pending_of("here", durable=True))

    def running() -> set[str]:
        found = read_snapshot(begun, "here")
        return {each for each in records.STAGES if found.state_of(each) is StageState.RUNNING}

    assert running() == {"persist"}
    (begun.path / FILES[1]).touch()
    assert running() == {"commit", "persist"}
    lock.release()


def test_snapshots_are_in_the_order_of_their_saves(tmp_path: Path) -> None:
    """Steps, and for each step the epochs of the run, and then the times of saves."""
    run = Home(tmp_path).run(new_run_id())
    saves = [(1, 2, 5.0), (2, 0, 9.0), (2, 0, 10.0), (2, 1, 0.0), (2, 1, None), (2, None, None)]
    saves.append((3, 0, 0.0))
    for number, (step, epoch, saved_at) in enumerate(saves):
        place = place_of(run, step, f"{16 - number:016x}")
        if epoch is not None:
            part = msgspec.structs.replace(part_of(place, 0), epoch=epoch)
            write_record(place.path / records.rank_record(0), part)
        if saved_at is not None:
            pending = msgspec.structs.replace(pending_of("", saved_at=saved_at), epoch=epoch)
            write_record(place.path / records.PENDING, pending)
    found = [each.place.save_id for each in read_run_view(run).snapshots]
    assert found == [f"{16 - number:016x}" for number in range(len(saves))]


def test_records_are_read_again_only_when_they_are_replaced(begun: SnapshotDirectory) -> None:
    cache, path = RecordCache(), begun.path / records.rank_record(0)
    first = cache.read(path, RankPart)
    assert first == part_of(begun, 0)
    assert cache.read(path, RankPart) is first
    begin(begun, 0)
    second = cache.read(path, RankPart)
    assert second is not first
    assert cache.read(path, RankPart) is second
    cache.forget_unused()
    cache.forget_unused()
    assert cache.read(path, RankPart) is not second
    path.unlink()
    assert cache.read(path, RankPart) is None


def test_a_snapshot_may_be_freed_while_it_is_read(
    begun: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after the names of its files were read. What has become of the save is known still."""
    write_record(begun.path / records.PENDING, pending_of("here"))
    SaveStates().end(begun, {"commit": StageOutcome(seconds=1.0)})
    named = SnapshotDirectory.list_names

    def named_just_before(self: SnapshotDirectory, suffix: str = "") -> list[str]:
        found = named(self, suffix)
        free_now(self)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotDirectory, "list_names", named_just_before)
        found = read_snapshot(begun, "here")
    assert found.parts == ()
    assert found.state_of("commit") is StageState.DONE
    assert not begun.path.exists()
    assert read_state(begun).outcomes["commit"].seconds == 1.0


# Notes of a snapshot as a node reads them, also when they are damaged.

__all__ = ["shm"]
ONE, OTHER = "0" * 16, "1" * 16
DAMAGES = [b'"', b'{"save_id": "\xff"}', b"[" * 100_000]


@pytest.fixture
def place(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot of which there is nothing yet."""
    return place_of(Home(tmp_path).run(new_run_id()), save_id=ONE)


def pending(save_id: str) -> PendingManifest:
    return PendingManifest(
        save_id=save_id,
        step=1,
        manifest="",
        files=[],
        nodes=[AgentInfo("a", "", "")],
        leader="a",
        storage=StorageTask(root="/nowhere"),
    )


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_of_a_rank_is_passed_over_and_told_of_once(
    place: SnapshotDirectory, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    for rank in (0, 1):
        begin(place, rank)
    assert place.parts() == [part_of(place, rank) for rank in (0, 1)]
    write_record(place.path / records.rank_record(0), damage)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert place.parts() == [part_of(place, 1)]
            assert read_snapshot(place).parts == (part_of(place, 1),)
    (told,) = caplog.messages
    assert records.rank_record(0) in told


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pending_manifest_is_passed_over_and_told_of_once(
    place: SnapshotDirectory, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    other = place_of(place.run, 1, OTHER)
    for each in (place, other):
        write_record(each.path / records.PENDING, pending(each.save_id))
    assert place.run.pending_manifests() == [pending(ONE), pending(OTHER)]
    write_record(place.path / records.PENDING, damage)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert place.run.pending_manifests() == [pending(OTHER)]
            assert read_snapshot(place).pending is None
    (told,) = caplog.messages
    assert ONE in told
    assert records.PENDING in told


@pytest.mark.parametrize("is_freed", [False, True])
def test_a_damaged_state_is_a_failure_of_all_stages(
    place: SnapshotDirectory, is_freed: bool
) -> None:
    assert read_state(place) == SaveState()
    write_record(place.path / records.STATE, DAMAGES[0])
    if is_freed:
        free_now(place)
        assert not place.path.exists()
    outcomes = read_state(place).outcomes
    assert outcomes.keys() == {*records.STAGES, records.REMOVE_OLD}
    assert all("damaged" in each.failure for each in outcomes.values())


def test_a_save_whose_pending_manifest_is_damaged_ends_as_a_failure(
    place: SnapshotDirectory,
) -> None:
    """On the node that leads it: no other node knows how to."""
    begin(place, 0)
    write_record(place.path / records.PENDING, DAMAGES[0])
    with agent_in_threads(Home(place.run.path.parents[2]), "a"):
        until(lambda: len(read_state(place).outcomes) == 2)
    outcomes = read_state(place).outcomes
    assert outcomes.keys() == {"commit", "protect"}
    assert all("is damaged" in each.failure for each in outcomes.values())
    assert not read_run_view(place.run).snapshots[0].open_stages


@pytest.mark.parametrize("stage", records.STAGES)
def test_a_node_without_the_pending_manifest_does_not_do_its_part(
    place: SnapshotDirectory, stage: str
) -> None:
    """It waits for it, because it travels at the same time; but not for ever."""
    part = msgspec.structs.replace(part_of(place, 0), above=[AgentInfo("top", "", "")])
    write_record(place.path / records.rank_record(0), part)
    write_record(place.path / records.PENDING, DAMAGES[0])
    follower, call = Follower("a", MappedFiles()), ("top", 0.1)
    assert follower.calls.receive(place, stage, call) is None
    requested = follower.calls.stages_of(place)
    found = read_snapshot(place, "a", requested=requested)
    assert found.state_of(on_this_node(stage)) is StageState.RUNNING
    assert not found.leads
    follower.answer(Action(on_this_node(stage), place))
    assert not follower.calls.stages_of(place)
    reply = follower.calls.receive(place, stage, call)
    assert reply is not None
    assert reply.nodes == b""
    assert records.PENDING in reply.failures["a"]


def test_a_damaged_note_of_a_file_keeps_no_other_from_being_sealed(
    place: SnapshotDirectory,
) -> None:
    write_record(place.path / records.rank_record(0), DAMAGES[0])
    begin(place, 1)
    name = f"r00001-{ONE}.safetensors"
    for file in (f"r00000-{ONE}.safetensors", name):
        (place.path / file).touch()
    actions = decide_run(read_run_view(place.run), 0.0)
    assert actions == [Action("seal", place, names=(name,))]
    Follower("a", MappedFiles()).seal(actions[0])
    assert read_state(place).entries.keys() == {name}
    assert not decide_run(read_run_view(place.run), 0.0)


def manifest_of(save_id: str) -> bytes:
    manifest = Manifest(
        save_id=save_id,
        step=1,
        created="now",
        world_size=1,
        files=(),
        objects=(),
        tensors=Raw(b"[]"),
    )
    return encode_manifest(manifest)


def commit_of(place: SnapshotDirectory) -> StageOutcome | None:
    return read_state(place).outcomes.get("commit")


def test_a_pending_manifest_of_which_a_bit_has_flipped_is_not_committed(
    place: SnapshotDirectory,
) -> None:
    text = manifest_of(ONE).decode().replace('"world_size":1', '"world_size":3')
    damaged = msgspec.structs.replace(pending(ONE), manifest=text)
    write_record(place.path / records.PENDING, damaged)
    with agent_in_threads(Home(place.run.path.parents[2]), "a"):
        until(lambda: commit_of(place))
    ended = commit_of(place)
    assert ended is not None
    assert "the pending manifest was altered" in ended.failure
    assert not place.is_committed()


def test_a_commit_does_not_wait_for_a_node_whose_files_it_does_not_need(
    place: SnapshotDirectory,
) -> None:
    """It may be lost; a restore takes the snapshot from the others meanwhile."""
    with unreachable() as port:
        lost = AgentInfo("b", f"http://127.0.0.1:{port}", TOKEN)
        nodes = [AgentInfo("a", "", ""), lost]
        text = manifest_of(ONE).decode()
        led = msgspec.structs.replace(pending(ONE), nodes=nodes, manifest=text, wait=2.0)
        write_record(place.path / records.PENDING, led)
        started = time.monotonic()
        with agent_in_threads(Home(place.run.path.parents[2]), "a"):
            until(lambda: commit_of(place))
            assert time.monotonic() - started < 1.5
            ended = commit_of(place)
            assert ended is not None
            assert not ended.failure
            assert place.is_committed()


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_note_is_a_store_error(place: SnapshotDirectory, damage: bytes) -> None:
    write_record(place.path / "note.json", damage)
    with pytest.raises(StoreError, match=r"note\.json"):
        read_record(place.path / "note.json", PendingManifest)


def test_what_was_begun_to_be_completed_is_not_completed_again(place: SnapshotDirectory) -> None:
    """An agent that is killed in mid-work leaves a mixture, to which nothing must be added."""
    made = RingFile("rank-00000.made-0.bin", f"r00001-{ONE}.safetensors", {})
    (place.path / made.file).write_bytes(b"copy")
    assert claim_ring_file(place, made)
    assert not place.has(made.file)
    assert place.temporary_path(made.name).read_bytes() == b"copy"
    assert not claim_ring_file(place, made)
    assert place.temporary_path(made.name).read_bytes() == b"copy"


def test_an_older_save_of_a_step_does_not_replace_a_newer_one_in_storage(
    tmp_path: Path, shm: Path
) -> None:
    """Such as one whose agent could not reach the storage before."""
    with sw.Checkpointer(
        tmp_path / "root", save_every=1, memory=sw.Memory(dir=str(shm), wait=10.0)
    ) as cp:
        handle = cp.save(1, {"t": 1})
        assert handle is not None
        handle.result(20.0)
        (newer,) = Home(shm).runs()[0].snapshots()
        found = newer.read_pending()
        assert found is not None
        older = SnapshotDirectory(newer.run, 1, ONE)
        replaced = {"save_id": ONE, "saved_at": found.saved_at - 1.0, "overwrite": True}
        led = msgspec.structs.replace(found, files=[], durable=True, **replaced)
        staging = tmp_path / "staging"
        staging.mkdir()
        write_record(staging / records.PENDING, led)
        write_record(staging / "manifest.json", manifest_of(ONE))
        state = SaveState(outcomes={"commit": StageOutcome()})
        write_record(staging / records.STATE, state)
        staging.rename(older.path)
        Home(shm).wake()
        until(lambda: "persist" in read_state(older).outcomes)
    assert sw.open(tmp_path / "root" / "step-00000001")["t"] == 1


# The table of states in docs/parts/snapshots.md.

PAGE = Path(__file__).parents[2] / "docs" / "parts" / "snapshots.md"
STATES = ("copying", "staged", "sealed", "committed", "protected", "persisted")
ENDED = {"committed": "commit", "protected": "protect", "persisted": "persist"}


def documented() -> dict[str, tuple[list[str], list[str]]]:
    """For each state, the actions of the leading agent and of another one, as the page says."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if (state := cells[0].partition(":")[0]) in STATES and len(cells) == 4:
            found[state] = tuple(
                [] if cell == "nothing" else [each.strip(" `") for each in cell.split(",")]
                for cell in cells[1:3]
            )
    return found  # type: ignore[return-value]


def reach(place: SnapshotDirectory, state: str, *, leads: bool) -> None:
    """What a node has of a durable save in this state, and in those before it."""
    leader = AgentInfo("leader", "http://127.0.0.1:1", "t")
    entry = FileEntry(FILES[0], 0, 0, 0, 0, 0, 0)
    above = [] if leads else [leader]
    stages = ("commit", "protect", "persist")
    part = RankPart(file=entry, snapshots_to_keep=2, stages=stages, epoch=0, above=above)
    write_record(place.path / records.rank_record(0), part)
    write_record(place.path / records.PENDING, pending_of("leader", durable=True))
    reached, states = STATES[: STATES.index(state) + 1], SaveStates()
    if "staged" in reached:
        (place.path / FILES[0]).touch()
    if "sealed" in reached:
        states.change(place, lambda one: msgspec.structs.replace(one, entries={FILES[0]: entry}))
    for each in reached:
        if each == "committed":
            place.manifest_path.touch()
        if each in ENDED:
            states.end(place, {ENDED[each]: StageOutcome()})


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("leads", [True, False])
def test_the_page_says_what_agents_do_in_each_state(
    tmp_path: Path, state: str, leads: bool
) -> None:
    place = place_of(Home(tmp_path).run(new_run_id()))
    lock = RankLock(place.run, 0)
    reach(place, state, leads=leads)
    seen = read_snapshot(place, "leader" if leads else "other")
    actions = decide_run(RunView(run=place.run, snapshots=(seen,)), 0.0)
    assert sorted(each.kind for each in actions) == sorted(documented()[state][not leads])
    lock.release()
