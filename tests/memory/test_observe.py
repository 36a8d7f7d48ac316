"""What an agent sees of a snapshot: when there is work, and what is damaged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import Raw

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.parts.memory import decide, observe, records
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.agent.lead import Leader
from shardwise.parts.memory.agent.protect import claim_ring_file
from shardwise.parts.memory.decide import Action, decide_run
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import Home, SnapshotDirectory, new_run_id
from shardwise.parts.memory.observe import RecordCache, read_outcome, read_run_view, read_snapshot
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RingFile,
    StagedFile,
    StageOutcome,
    SubtreeReply,
)
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.view import StageState
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import agent_in_threads
from tests.memory.test_nodes import unreachable
from tests.memory.test_server import TOKEN
from tests.memory.test_snapshots import shm
from tests.tools.agents import until

# What an agent sees of a snapshot: when there is work to do, and when it has to wait.

SAVE = "0" * 16
FILES = [f"r{rank:05d}-{SAVE}.safetensors" for rank in (0, 1)]


@pytest.fixture
def begun(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot of a node with two ranks: the first has staged, and the second copies."""
    place = SnapshotDirectory(Home(tmp_path).run(new_run_id()), 1)
    place.path.mkdir(parents=True)
    stage(place, FILES[0])
    write_record(place.path / records.save_record("persist", SAVE), {})
    (place.path / records.file_record(FILES[1], "copying")).touch()
    return place


def stage(place: SnapshotDirectory, name: str) -> None:
    entry = FileEntry(name, 0, 0, 0, 0, 0, 0)
    write_record(
        place.path / records.file_record(name, "staged"),
        StagedFile(entry, "slot", 2, ("commit", "protect")),
    )
    (place.path / name).touch()


def due(place: SnapshotDirectory) -> tuple[StageState, StageState]:
    """Whether checksums are taken, and files are copied to storage."""
    save = read_snapshot(place).saves[SAVE]
    return save.state_of("seal"), save.state_of("copy")


def test_only_checksums_wait_while_another_rank_copies(begun: SnapshotDirectory) -> None:
    lock = RankLock(begun.run, 1)
    assert due(begun) == (StageState.WAITING, StageState.RUNNING)
    (begun.path / records.file_record(FILES[1], "copying")).unlink()
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def test_a_record_without_its_file_is_nothing_to_do(begun: SnapshotDirectory) -> None:
    """The trainer was killed before it moved the file to its place."""
    (begun.path / FILES[0]).unlink()
    save = read_snapshot(begun).saves[SAVE]
    assert save.state_of("seal") is StageState.NOT_REQUESTED
    assert not save.staged
    assert save.has_staged


def test_a_rank_that_was_lost_as_it_copied_is_not_waited_for(begun: SnapshotDirectory) -> None:
    """The agent that leads would wait for this node's part, and rescue nothing meanwhile."""
    RankLock(begun.run, 1).release_as_lost()
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)


def test_a_rank_that_is_stuck_as_it_copies_is_not_waited_for_once_the_commit_has_failed(
    begun: SnapshotDirectory,
) -> None:
    lock = RankLock(begun.run, 1)
    done = StageOutcome(save_id=SAVE, stage="commit", failure="stuck")
    write_record(begun.path / records.save_record("commit", SAVE, "all"), done)
    assert due(begun) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def pending_of(leader: str, *, durable: bool = False) -> PendingManifest:
    return PendingManifest(
        save_id=SAVE,
        step=1,
        manifest="{}",
        files=[],
        nodes=[],
        leader=leader,
        durable=durable,
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
    name = (
        records.save_record("pending", SAVE)
        if leads
        else records.save_record("pending", SAVE, "copy")
    )
    write_record(begun.path / name, pending_of("here", durable=durable))
    if called:
        write_record(begun.path / records.save_record("rescue", SAVE), {})
    if commit is not None:
        done = StageOutcome(save_id=SAVE, stage="commit", failure=commit)
        write_record(begun.path / records.save_record("commit", SAVE, "all"), done)
    save = read_snapshot(begun, "here").saves[SAVE]
    if commit is None:
        assert save.state_of("commit") is (StageState.RUNNING if leads else StageState.WAITING)
    else:
        assert save.state_of("commit") is (StageState.FAILED if commit else StageState.DONE)
    ready = leads and commit == ""
    assert save.state_of("protect") is (StageState.RUNNING if ready else StageState.WAITING)
    persists = (leads and durable) or called
    assert save.state_of("persist") is (
        StageState.RUNNING if persists else StageState.NOT_REQUESTED
    )
    assert save.state_of("rescue") is (StageState.DONE if called else StageState.NOT_REQUESTED)
    assert save.must_be_persisted == (leads and durable)


def test_records_are_read_again_only_when_they_are_replaced(begun: SnapshotDirectory) -> None:
    cache, path = RecordCache(), begun.path / records.file_record(FILES[0], "staged")

    def read() -> object:
        found = cache.read(path, StagedFile)
        assert found is not None
        return found[0]

    first = read()
    assert read() is first
    stage(begun, FILES[0])
    second = read()
    assert second is not first
    assert read() is second
    cache.forget_unused()
    cache.forget_unused()
    assert read() is not second
    path.unlink()
    assert cache.read(path, StagedFile) is None


def test_a_save_that_is_committed_meanwhile_is_not_taken_for_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest comes just after the names of files were read."""
    first, second = "a" * 16, "b" * 16
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1)
    place.path.mkdir(parents=True)

    def commit(save_id: str) -> None:
        manifest = Manifest(
            save_id=save_id,
            step=1,
            created="",
            world_size=1,
            files=(),
            objects=(),
            tensors=Raw(b"[]"),
        )
        write_record(place.path / "manifest.json", encode_manifest(manifest))
        done = StageOutcome(save_id=save_id, stage="commit")
        write_record(place.path / records.save_record("commit", save_id, "all"), done)

    for save_id in (first, second):
        file = FileEntry(f"r00000-{save_id}.safetensors", 0, 0, 0, 0, 0, 0)
        (place.path / file.name).touch()
        write_record(
            place.path / records.file_record(file.name, "staged"),
            StagedFile(file, "slot", 2, ("commit",)),
        )
    commit(first)
    named = SnapshotDirectory.list_names

    def named_just_before(self: SnapshotDirectory, suffix: str) -> list[str]:
        found = named(self, suffix)
        commit(second)
        return found

    monkeypatch.setattr(SnapshotDirectory, "list_names", named_just_before)
    seen = observe.read_run_view(place.run)
    freed = [each for each in decide.decide_run(seen, 0.0) if each.kind == decide.FREE]
    assert all(each.names == (first,) for each in freed)
    monkeypatch.undo()
    seen = observe.read_run_view(place.run)
    assert decide.Action(
        decide.FREE, place, why=decide.REPLACED, names=(first,)
    ) in decide.decide_run(seen, 0.0)


# Notes of a snapshot as a node reads them, also when they are damaged.

__all__ = ["shm"]
ONE, OTHER = "0" * 16, "1" * 16
DAMAGES = [b'"', b'{"save_id": "\xff"}', b"[" * 100_000]


@pytest.fixture
def place(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot of which there is nothing yet."""
    place = SnapshotDirectory(Home(tmp_path).run(new_run_id()), 1)
    place.path.mkdir(parents=True)
    return place


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


def staged(save_id: str) -> StagedFile:
    return StagedFile(FileEntry(f"r00000-{save_id}.safetensors", 0, 0, 0, 0, 0, 0), "slot", 2, ())


def kept(save_id: str) -> RingFile:
    return RingFile(save_id, "slot", {})


@pytest.mark.parametrize(
    ("name", "note", "found"),
    [
        (
            lambda save_id: records.save_record("pending", save_id),
            pending,
            SnapshotDirectory.pending_manifests,
        ),
        (
            lambda save_id: records.save_record("pending", save_id, "copy"),
            pending,
            SnapshotDirectory.pending_manifests,
        ),
        (
            lambda save_id: records.file_record(f"r00000-{save_id}.safetensors", "staged"),
            staged,
            SnapshotDirectory.staged_files,
        ),
        (
            lambda save_id: records.file_record(f"r00000-{save_id}.safetensors", "kept-0"),
            kept,
            SnapshotDirectory.ring_files,
        ),
    ],
)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_note_is_passed_over_and_told_of_once(
    place: SnapshotDirectory,
    caplog: pytest.LogCaptureFixture,
    name: Callable[[str], str],
    note: Callable[[str], object],
    found: Callable[[SnapshotDirectory], list[object]],
    damage: bytes,
) -> None:
    for save_id in (ONE, OTHER):
        write_record(place.path / name(save_id), note(save_id))
        (place.path / f"r00000-{save_id}.safetensors").touch()
    assert found(place) == [note(ONE), note(OTHER)]
    write_record(place.path / name(ONE), damage)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert found(place) == [note(OTHER)]
    (told,) = caplog.messages
    assert name(ONE) in told


def test_a_damaged_outcome_is_a_failure(place: SnapshotDirectory) -> None:
    assert read_outcome(place, "commit", ONE) is None
    write_record(place.path / records.save_record("commit", ONE, "all"), DAMAGES[0])
    ended = read_outcome(place, "commit", ONE)
    assert ended is not None
    assert "damaged" in ended.failure


@pytest.mark.parametrize("stage", ["commit", "persist", "protect"])
def test_a_damaged_request_ends_as_a_failure(place: SnapshotDirectory, stage: str) -> None:
    write_record(place.path / records.save_record(stage, ONE), DAMAGES[0])
    following = Follower("a", MappedFiles())
    (action,) = decide_run(read_run_view(place.run), 0.0)
    kinds = {"commit": "collect", "persist": "copy", "protect": "protect_others"}
    assert action.kind == kinds[stage]
    getattr(following, action.kind)(action)
    done = read_record(place.path / records.save_record(stage, ONE, "done"), SubtreeReply)
    assert done is not None
    assert (done.stage, done.nodes) == (stage, b"")
    assert records.save_record(stage, ONE) in done.failures["a"]
    assert not decide_run(read_run_view(place.run), 0.0)


def test_a_damaged_note_of_a_file_keeps_no_other_from_being_sealed(
    place: SnapshotDirectory,
) -> None:
    write_record(
        place.path / records.file_record(f"r00000-{ONE}.safetensors", "staged"), DAMAGES[0]
    )
    write_record(
        place.path / records.file_record(f"r00000-{OTHER}.safetensors", "staged"), staged(OTHER)
    )
    (place.path / f"r00000-{OTHER}.safetensors").touch()
    actions = decide_run(read_run_view(place.run), 0.0)
    assert actions == [Action("seal", place, OTHER, names=(f"r00000-{OTHER}.safetensors",))]
    Follower("a", MappedFiles()).seal(actions[0])
    assert place.has(records.file_record(f"r00000-{OTHER}.safetensors", "entry"))


def test_a_pending_manifest_of_which_a_bit_has_flipped_is_not_committed(
    place: SnapshotDirectory,
) -> None:
    manifest = Manifest(
        save_id=ONE, step=1, created="now", world_size=1, files=(), objects=(), tensors=Raw(b"[]")
    )
    text = encode_manifest(manifest).decode().replace('"world_size":1', '"world_size":3')
    damaged = msgspec.structs.replace(pending(ONE), manifest=text)
    write_record(place.path / records.save_record("pending", ONE), damaged)
    with agent_in_threads(Home(place.run.path.parents[2]), "a"):
        until(lambda: read_outcome(place, "commit", ONE))
    ended = read_outcome(place, "commit", ONE)
    assert ended is not None
    assert "the pending manifest was altered" in ended.failure
    assert not place.is_committed()


def test_a_commit_does_not_wait_for_a_node_whose_files_it_does_not_need(
    place: SnapshotDirectory,
) -> None:
    """It may be lost; a restore takes the snapshot from the others meanwhile."""
    manifest = Manifest(
        save_id=ONE, step=1, created="now", world_size=1, files=(), objects=(), tensors=Raw(b"[]")
    )
    with unreachable() as port:
        lost = AgentInfo("b", f"http://127.0.0.1:{port}", TOKEN)
        replaced = {"manifest": encode_manifest(manifest).decode(), "leader": "a", "wait": 2.0}
        led = msgspec.structs.replace(
            pending(ONE), nodes=[AgentInfo("a", "", ""), lost], **replaced
        )
        write_record(place.path / records.save_record("pending", ONE), led)
        started = time.monotonic()
        with agent_in_threads(Home(place.run.path.parents[2]), "a"):
            until(lambda: read_outcome(place, "commit", ONE))
            assert time.monotonic() - started < 1.5
            ended = read_outcome(place, "commit", ONE)
            assert ended is not None
            assert not ended.failure
            assert place.is_committed()
            told = records.save_record("commit", ONE, "told")
            assert not place.has(told)
            until(lambda: place.has(told))


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_note_is_a_store_error(place: SnapshotDirectory, damage: bytes) -> None:
    write_record(place.path / "note.json", damage)
    with pytest.raises(StoreError, match=r"note\.json"):
        read_record(place.path / "note.json", PendingManifest)


def test_what_was_begun_to_be_completed_is_not_completed_again(place: SnapshotDirectory) -> None:
    """An agent that is killed in mid-work leaves a mixture, to which nothing must be added."""
    name = f"r00001-{ONE}.safetensors"
    note = records.file_record(f"r00000-{ONE}.safetensors", "kept-0")
    made = records.ring_file_name(note)
    record = RingFile(made, "slot", {})
    assert claim_ring_file(place, note, record, name) is None
    for _ in range(2):  # the second time, the agent was killed between the record and the move
        (place.path / made).write_bytes(b"copy")
        assert claim_ring_file(place, note, record, name) == record
        (claimed,) = place.ring_files()
        assert claimed.file == place.temporary_path(name).name
        assert place.temporary_path(name).read_bytes() == b"copy"
        record = claimed
    assert claim_ring_file(place, note, record, name) is None


def test_what_was_committed_of_another_save_of_a_step_is_not_published(
    tmp_path: Path, shm: Path
) -> None:
    with sw.Checkpointer(
        tmp_path / "root", save_every=2, memory=sw.Memory(dir=str(shm), wait=10.0)
    ) as cp:
        handle = cp.save(1, {"t": 1})
        assert handle is not None
        handle.result(20.0)
        home = Home(shm)
        snapshot = SnapshotDirectory(home.runs()[0], 1)
        pending = PendingManifest(
            save_id="0" * 16,
            step=1,
            manifest="",
            files=[],
            nodes=snapshot.pending_manifests()[0].nodes,
            leader=snapshot.pending_manifests()[0].leader,
            durable=True,
            storage=StorageTask(root=str(tmp_path / "root")),
        )
        write_record(
            snapshot.path / records.save_record("commit", pending.save_id, "all"),
            records.StageOutcome(save_id=pending.save_id, stage="commit"),
        )
        write_record(snapshot.path / records.save_record("pending", pending.save_id), pending)
        Leader(pending.leader).perform(Action("persist", snapshot, pending.save_id))
        done = read_outcome(snapshot, "persist", pending.save_id)
        assert done is not None
        assert "step 1 was saved again meanwhile" in done.failure
        assert cp.steps() == []
