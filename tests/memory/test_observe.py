"""What an agent sees of a snapshot: when there is work to do, and when it has to wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Raw

from shardwise.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.memory import decide, observe, records
from shardwise.memory.files import write_record
from shardwise.memory.home import Home, SnapshotDirectory, new_run_id
from shardwise.memory.observe import RecordCache, read_snapshot
from shardwise.memory.rank_locks import RankLock
from shardwise.memory.records import PendingManifest, StagedFile, StageOutcome, StorageTask
from shardwise.memory.view import StageState

SAVE = "0" * 16
FILES = [f"r{rank:05d}-{SAVE}.safetensors" for rank in (0, 1)]


@pytest.fixture
def place(tmp_path: Path) -> SnapshotDirectory:
    """A snapshot of a node with two ranks: the first has staged, and the second copies."""
    place = SnapshotDirectory(Home(tmp_path).run(new_run_id()), 1)
    place.path.mkdir(parents=True)
    stage(place, FILES[0])
    write_record(place.path / records.save_record("persist", SAVE), {})
    (place.path / records.copying_marker(FILES[1])).touch()
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


def test_nothing_is_begun_while_another_rank_copies(place: SnapshotDirectory) -> None:
    lock = RankLock(place.run, 1)
    assert due(place) == (StageState.WAITING, StageState.WAITING)
    (place.path / records.copying_marker(FILES[1])).unlink()
    assert due(place) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def test_a_record_without_its_file_is_nothing_to_do(place: SnapshotDirectory) -> None:
    """The trainer was killed before it moved the file to its place."""
    (place.path / FILES[0]).unlink()
    save = read_snapshot(place).saves[SAVE]
    assert save.state_of("seal") is StageState.NOT_REQUESTED
    assert not save.staged
    assert save.has_staged


def test_a_rank_that_was_lost_as_it_copied_is_not_waited_for(place: SnapshotDirectory) -> None:
    """The agent that leads would wait for this node's part, and rescue nothing meanwhile."""
    RankLock(place.run, 1).release_as_lost()
    assert due(place) == (StageState.RUNNING, StageState.RUNNING)


def test_a_rank_that_is_stuck_as_it_copies_is_not_waited_for_once_the_commit_has_failed(
    place: SnapshotDirectory,
) -> None:
    lock = RankLock(place.run, 1)
    done = StageOutcome(save_id=SAVE, stage="commit", failure="stuck")
    write_record(place.path / records.save_record("commit", SAVE, "all"), done)
    assert due(place) == (StageState.RUNNING, StageState.RUNNING)
    lock.release()


def pending(leader: str, *, durable: bool = False) -> PendingManifest:
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
    place: SnapshotDirectory, leads: bool, durable: bool, called: bool, commit: str | None
) -> None:
    """On the node that leads it, and on another."""
    name = (
        records.save_record("pending", SAVE)
        if leads
        else records.save_record("pending", SAVE, "copy")
    )
    write_record(place.path / name, pending("here", durable=durable))
    if called:
        write_record(place.path / records.save_record("rescue", SAVE), {})
    if commit is not None:
        done = StageOutcome(save_id=SAVE, stage="commit", failure=commit)
        write_record(place.path / records.save_record("commit", SAVE, "all"), done)
    save = read_snapshot(place, "here").saves[SAVE]
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


def test_records_are_read_again_only_when_they_are_replaced(place: SnapshotDirectory) -> None:
    cache, path = RecordCache(), place.path / records.file_record(FILES[0], "staged")

    def read() -> object:
        found = cache.read(path, StagedFile)
        assert found is not None
        return found[0]

    first = read()
    assert read() is first
    stage(place, FILES[0])
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
