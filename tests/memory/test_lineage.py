"""Where a run has gone back is written down in its root, and what it abandoned is passed over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

import shardwise as sw
from shardwise.kernel.manifest.manifest import Manifest, encode_manifest
from shardwise.kernel.store import LocalStore
from shardwise.parts.lineage import (
    MOST_RESUMPTIONS,
    Lineage,
    Resumption,
    read_or_create_lineage,
    resume_from,
)
from shardwise.parts.memory import records
from shardwise.parts.memory.files import encode_record
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.remote.assembled import SnapshotLocations
from shardwise.parts.memory.remote.search import NodeFiles, Search
from shardwise.parts.tiers.options import StorageTask

RUN_FILE = "0" * 16
steps = st.one_of(st.none(), st.integers(0, 12))


def is_abandoned(resumptions: list[tuple[int, int]], epoch: int, step: int) -> bool:
    """By the definition: a later epoch begins after an earlier step."""
    return any(later > epoch and begins < step for later, begins in resumptions)


@given(st.lists(steps, max_size=30))
def test_what_is_left_of_the_branches_says_what_all_of_them_do(went: list[int | None]) -> None:
    lineage = Lineage(RUN_FILE)
    for step in went:
        lineage = lineage.after_resuming(step)
    every = [(epoch, -1 if s is None else s) for epoch, s in enumerate(went, start=1)]
    assert lineage.epoch == len(went)
    for step in range(14):
        branch = lineage.last_resumption_before(step)
        for epoch in range(len(went) + 1):
            found = branch is not None and branch.epoch > epoch
            assert found == is_abandoned(every, epoch, step), (epoch, step)


def test_many_branches_stay_few_and_abandon_no_less() -> None:
    lineage = Lineage(RUN_FILE)
    every = []
    for step in range(3 * MOST_RESUMPTIONS):
        lineage = lineage.after_resuming(step)
        every.append((lineage.epoch, step))
    assert len(lineage.resumptions) <= MOST_RESUMPTIONS + 1
    for step in range(0, 3 * MOST_RESUMPTIONS + 2, 5):
        branch = lineage.last_resumption_before(step)
        for epoch in range(0, lineage.epoch + 1, 7):
            if is_abandoned(every, epoch, step):
                assert branch is not None
                assert branch.epoch > epoch
    assert lineage.last_resumption_before(3 * MOST_RESUMPTIONS - 1) == Resumption(
        lineage.epoch - 1, step=190
    )


def test_it_is_written_down(tmp_path: Path) -> None:
    root = LocalStore(tmp_path / "root")
    begun = read_or_create_lineage(root)
    assert (read_or_create_lineage(root), begun.epoch) == (begun, 0)
    for step, expected in [
        (20, [(1, 20)]),
        (35, [(1, 20), (2, 35)]),
        (30, [(1, 20), (3, 30)]),
        (None, [(4, -1)]),
    ]:
        after = resume_from(root, begun.run, step)
        assert read_or_create_lineage(root) == after
        assert [(each.epoch, each.step) for each in after.resumptions] == expected


def test_a_root_of_before_has_no_branches(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(f'{{"run": "{RUN_FILE}"}}')
    assert read_or_create_lineage(LocalStore(tmp_path)) == Lineage(RUN_FILE)


@pytest.mark.parametrize("text", ["", "{}", '{"run": "../x"}', '{"run": 1}', '"\udcff"'])
def test_a_damaged_root_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(sw.StoreError, match=r"run\.json is damaged .*; remove the file"):
        read_or_create_lineage(LocalStore(tmp_path))


def test_a_root_that_was_begun_anew_is_an_error(tmp_path: Path) -> None:
    root = LocalStore(tmp_path)
    with pytest.raises(sw.StoreError, match="was removed while"):
        resume_from(root, RUN_FILE, 1)
    other = read_or_create_lineage(root)
    with pytest.raises(sw.StoreError, match=f"emptied meanwhile, and run {other.run}"):
        resume_from(root, RUN_FILE, 1)
    assert read_or_create_lineage(root) == other


Disk = dict[SnapshotDirectory, dict[str, bytes]]
HERE = Run(Path(RUN_FILE))


def saved(step: int, epoch: int | None, *, saved_at: float = 0.0, tag: int = 0) -> Disk:
    """What a node has of a snapshot without files, saved in an epoch.

    Args:
        tag: the first digit of the id of the save.
    """
    save_id = f"{tag:x}{step:07x}{9 if epoch is None else epoch:08x}"
    manifest = Manifest(
        save_id=save_id,
        step=step,
        created="now",
        world_size=1,
        files=(),
        objects=(),
        tensors=Raw(b"[]"),
    )
    found = {"manifest.json": encode_manifest(manifest)}
    if epoch is not None:
        pending = records.PendingManifest(
            save_id=save_id,
            step=step,
            manifest="",
            files=[],
            nodes=[],
            leader="a",
            epoch=epoch,
            saved_at=saved_at,
            storage=StorageTask(root=""),
        )
        found[records.PENDING] = encode_record(pending)
    return {SnapshotDirectory(HERE, step, save_id): found}


def united(disks: Iterable[Disk]) -> Disk:
    return {place: files for disk in disks for place, files in disk.items()}


def chosen(nodes: Sequence[Disk], lineage: Lineage) -> tuple[int | None, str]:
    """The step that is chosen of what nodes hold, and why no newer one."""
    found = choose(nodes, lineage)
    return found.step, str(found.skipped)


def choose(nodes: Sequence[Disk], lineage: Lineage) -> SnapshotLocations:
    """What is chosen of what nodes hold."""

    def read(node: str, place: SnapshotDirectory, name: str) -> bytes:
        return nodes[int(node)][place][name]

    def sizes(files: dict[str, bytes]) -> dict[str, int]:
        return {name: len(data) for name, data in files.items()}

    held = [
        NodeFiles(str(node), {place.name: sizes(files) for place, files in disk.items()}, [])
        for node, disk in enumerate(nodes)
    ]
    infos = {each.node: records.AgentInfo(each.node, "http://x", "t") for each in held}
    search = Search(HERE, "here", held, infos, lineage=lineage)
    search.read = read  # type: ignore[method-assign]
    return search.choose_snapshot(None)


def test_abandoned_snapshots_of_idle_nodes_are_passed_over() -> None:
    idle = united(saved(step, 0) for step in (19, 20, 35, 37))
    busy = united(saved(step, 1) for step in (21, 30))
    lineage = Lineage(RUN_FILE)
    assert chosen([idle], lineage)[0] == 37
    lineage = lineage.after_resuming(20)
    step, why = chosen([idle], lineage)
    assert step == 20
    assert why.count("superseded: the run resumed from step 20") == 2
    assert chosen([idle, busy], lineage)[0] == 30
    again = saved(35, 1)
    assert chosen([idle, busy | again], lineage)[0] == 35
    assert chosen([idle, busy], lineage.after_resuming(None)) == (
        None,
        str([(s, "memory: superseded: the run started anew") for s in (37, 35, 30, 21, 20, 19)]),
    )


def test_one_of_which_nobody_can_tell_when_it_was_saved_is_passed_over() -> None:
    held = united(saved(step, None) for step in (5, 7))
    assert chosen([held], Lineage(RUN_FILE))[0] == 7
    step, why = chosen([held], Lineage(RUN_FILE).after_resuming(5))
    assert step == 5
    assert "no pending manifest says" in why


def test_a_damaged_pending_manifest_is_made_up_for_by_anothers() -> None:
    lineage = Lineage(RUN_FILE).after_resuming(5)
    whole = saved(7, 1)
    damaged = {place: files | {records.PENDING: b"\xff"} for place, files in whole.items()}
    assert chosen([damaged], lineage)[0] is None
    assert chosen([damaged, whole], lineage)[0] == 7


@pytest.mark.parametrize("tags", [(0, 1), (1, 0)])
def test_the_newer_save_of_a_step_is_chosen_and_the_older_if_it_is_incomplete(
    tags: tuple[int, int],
) -> None:
    """Whatever the ids of the saves are, and in whatever order nodes answer."""
    lineage = Lineage(RUN_FILE)
    old, new = saved(7, 0, saved_at=9.0, tag=tags[0]), saved(7, 1, saved_at=5.0, tag=tags[1])
    ((old_place, _),), ((new_place, files),) = old.items(), new.items()
    for nodes in ([old, new], [new, old], [old | new]):
        assert choose(nodes, lineage).save_id == new_place.save_id
        assert choose(nodes, lineage.after_resuming(5)).save_id == new_place.save_id
    uncommitted = {new_place: {records.PENDING: files[records.PENDING]}}
    for nodes in ([old, uncommitted], [uncommitted, old]):
        assert choose(nodes, lineage).save_id == old_place.save_id
        assert choose(nodes, lineage.after_resuming(5)).step is None
    later = saved(7, 1, saved_at=6.0, tag=2)
    assert choose([old, new, later], lineage).save_id == next(iter(later)).save_id
    ((place, files),) = later.items()
    assert choose([old, new, {place: {}}], lineage).save_id == new_place.save_id
