"""Frees memory: data files return to the pool of free files, and other files are deleted.

Only the agent of a node frees snapshots, under an exclusive lock of the snapshot's directory, so
that no snapshot is freed while it is in use. `decide.py` chooses them. A trainer marks the
snapshots that it no longer needs as abandoned (`discard`), and waits until the agent has freed
them.

First, the directory of the snapshot is renamed. From then on, the snapshot does not exist. If the
agent is then killed, `finish_freeing` returns the files in the renamed directory to the pool.

Functions `free…` return False if a snapshot is in use.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StateError, StoreError
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory import records
from shardwise.parts.memory.decide import (
    REPLACED,
    UNCOMMITTABLE,
    Action,
    find_superseded,
    is_superseded,
)
from shardwise.parts.memory.files import lock_directory, read_record, regular_files
from shardwise.parts.memory.home import FREED_PREFIX, Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import read_run_view, read_snapshot
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.pool import AGENT, Pool, owners_of_files
from shardwise.parts.memory.rank_liveness import has_trainers, ranks_here
from shardwise.parts.memory.records import STATE, RankPart, is_rank_record, rank_in_name
from shardwise.parts.memory.states import SaveStates
from shardwise.parts.memory.times import FREE_TIMEOUT, LOOK_PERIOD, POLL_PAUSE, SHORT_PATIENCE
from shardwise.parts.tiers.options import StorageTask

REMOVED_RUN_PREFIX = "vacant-"
MOST_ENDED = 64
log = logging.getLogger("shardwise")


def free(action: Action, states: SaveStates) -> bool:
    """Free a snapshot. Return False if it is in use: it is then marked as abandoned.

    A snapshot that can never be committed stays if it was committed meanwhile.
    """
    place, why = action.place, action.why
    if why == UNCOMMITTABLE and not states.fail_commit(place, why):
        return True
    if not free_snapshot(place, states.lock):
        place.abandon()
        return not place.path.exists()
    if why in (REPLACED, UNCOMMITTABLE) or has_trainers(place.run):
        _shrink_pool(place.run)
    else:
        Pool(place.run.free_directory).shrink()
        log.info("run %s: freed step %d: %s", place.run.name, place.step, why)
    return True


def free_snapshot(place: SnapshotDirectory, lock: AbstractContextManager[object]) -> bool:
    """Free a snapshot; return False if it is in use.

    Args:
        lock: the lock of the states of saves, held while the snapshot leaves its directory.
    """
    for _ in Deadline(LOOK_PERIOD).attempts(pause=POLL_PAUSE):
        with place.hold(shared=False) as held:
            if held:
                with lock:
                    freed = _leave_directory(place)
                _return_files(place.run, freed)
                return True
        if not place.path.exists():
            break
    return False


def _leave_directory(place: SnapshotDirectory) -> Path:
    """Rename the directory of a snapshot, and keep the state of its save; return the new path."""
    freed = place.run.path / f"{FREED_PREFIX}{secrets.token_hex(8)}"
    ended = place.ended_path
    ended.parent.mkdir(exist_ok=True)
    with suppress(OSError):  # there is none, or it is no file
        ended.unlink(missing_ok=True)
        os.link(place.path / STATE, ended)  # so it can be read all the time
    place.path.rename(freed)
    _trim_ended(ended.parent)
    return freed


def finish_freeing(run: Run) -> None:
    """Finish to free snapshots, after a process was killed meanwhile."""
    for freed in run.freed_directories():
        _return_files(run, freed)


def _return_files(run: Run, freed: Path) -> None:
    """Return the data files to the pool, and delete other files.

    The records of ranks go last, because they say whose files these are.
    """
    pool, owners = Pool(run.free_directory), owners_of_files(freed)
    with suppress(FileNotFoundError):
        for name in sorted(os.listdir(freed), key=lambda name: (is_rank_record(name), name)):
            path = freed / name
            with suppress(FileNotFoundError):
                if name in owners:
                    pool.give(owners[name], path)
                elif path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
        freed.rmdir()


def _shrink_pool(run: Run) -> None:
    """Delete the free files that the next saves do not need."""
    places = run.snapshots()
    newest = next((each for each in reversed(places) if each.is_committed()), None)
    if newest is not None:
        made = max(list(owners_of_files(each.path).values()).count(AGENT) for each in places)
        # Ranks that staged a file of the newest snapshot may return to this node.
        ranks = {rank_in_name(name) for name in newest.list_names() if is_rank_record(name)}
        ranks |= {rank for rank, is_alive, _ in ranks_here(run, 0) if is_alive}
        Pool(run.free_directory).shrink(ranks, made)


def discard(home: Home, places: Sequence[SnapshotDirectory]) -> None:
    """Mark snapshots as abandoned, and wait until the agent has freed them.

    If no agent runs, or it hangs, they are freed as soon as an agent runs. This does no harm,
    because nobody does anything with a marked snapshot but free it.

    Raises:
        StoreError: the agent does not release a snapshot.
    """
    for place in places:
        place.abandon()
    home.wake()
    patience = Deadline(SHORT_PATIENCE if home.has_agent() else 0.0)
    for place in places:
        if not any(_is_out_of_use(place, patience) for _ in Deadline(FREE_TIMEOUT).attempts()):
            raise StoreError(
                f"timed out after {FREE_TIMEOUT:.0f} s waiting for the lock of {place.path}: "
                "the agent of this node is using the snapshot; see its log, and try again"
            )
    if left := [place.name for place in places if place.path.exists()]:
        log.warning("no agent answers in %s, so %s are freed when one runs", home, ", ".join(left))


def _is_out_of_use(place: SnapshotDirectory, patience: Deadline) -> bool:
    """Return whether a snapshot is freed. After `patience`, it is enough that nobody uses it."""
    if patience.has_passed():
        with place.hold(shared=False) as is_unused:
            return is_unused or not place.path.exists()
    return not place.path.exists() and not place.run.freed_directories()


def discard_superseded(
    home: Home,
    run: Run,
    step: int | None,
    lineage: Lineage,
    nodes: Collection[str],
    slots: int,
) -> None:
    """After a restore, discard the snapshots that the run no longer needs (see `find_superseded`).

    Raises:
        StoreError: the agent does not release a snapshot.
    """
    discard(home, find_superseded(read_run_view(run), step, lineage, nodes, slots))
    task = None
    with suppress(StoreError):
        task = read_record(run.task_path, StorageTask)
    if task is not None and task.mirror is None:  # the steps to remove are others now
        run.task_path.unlink(missing_ok=True)


def refuse_older_step(run: Run, step: int, lineage: Lineage, root: object) -> None:
    """Raise if memory holds a newer step that the run has not abandoned.

    A restore would load the newer step instead of the step that is being saved.

    Raises:
        StateError: memory holds a newer step.
    """
    snapshots = [read_snapshot(each) for each in run.snapshots() if each.step > step]
    newer = [
        each.step for each in snapshots if each.is_committed and not is_superseded(each, lineage)
    ]
    if newer:
        raise StateError(
            f"cannot save step {step}: memory holds the newer step {newer[-1]} of this run. To "
            f"resume from step {newer[-1]}, call restore() first; to go back, call restore(state, "
            "step=…); to start over, save to another root, or delete the directory of this root, "
            f"{root}"
        )


def forget_copies(run: Run, rank: int) -> None:
    """Remove what is left of the copies that an earlier process of this rank began.

    An agent may still read a file whose copy it follows, so that file is not used again.
    """
    for place in run.snapshots():
        path = place.path / records.rank_record(rank)
        with suppress(StoreError):  # the record is damaged
            part = read_record(path, RankPart)
            if part is None or part.file is None or part.failure or place.has(part.file.name):
                continue
            place.temporary_path(part.file.name).unlink(missing_ok=True)
            path.unlink(missing_ok=True)


def remove_if_unused(home: Home, run: Run) -> None:
    """Remove a run that has neither trainers nor snapshots.

    A trainer that starts at the same time locks the directory first, or creates it again.

    Raises:
        StoreError: the run has snapshots of another version of shardwise.
    """
    run.refuse_other_version()
    with lock_directory(run.path, shared=False) as locked:
        if locked and not run.snapshots(abandoned=True) and not has_trainers(run):
            remove_run(home, run)


def finish_removals(home: Home) -> None:
    """Finish the removals of runs that were interrupted."""
    for path in home.path.glob(f"{REMOVED_RUN_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_other_runs(home: Home, run: Run, root: str) -> None:
    """Remove the other runs of a root. No training resumes them, as the root belongs to `run` now.

    A run is kept if it has a trainer on this node, or if the agent does not release its snapshots.
    """
    for other in home.runs():
        if other != run and other.root() == root and not has_trainers(other):
            try:
                discard(home, other.snapshots(abandoned=True))
                remove_if_unused(home, other)
            except StoreError as error:
                log.warning("cannot remove run %s of the same root: %s", other.name, error)


def clear_run(home: Home, run: Run, *, force: bool) -> None:
    """Remove everything that a node stores for a run.

    Args:
        force: whether to remove it even if a trainer of the run is alive on the node. Then the
            directory of the run stays, with the locks of its ranks.

    Raises:
        StoreError: a trainer is alive, or the agent does not release a snapshot.
    """
    _refuse_trainers(run, force)
    discard(home, run.snapshots(abandoned=True))
    with lock_directory(run.path, shared=False) as locked:
        _refuse_trainers(run, force)
        if locked and has_trainers(run):
            Pool(run.free_directory).shrink()
        elif locked:
            remove_run(home, run)
        elif run.path.exists():
            raise StoreError(
                f"run {run.name}: its snapshots were removed, but a trainer has just started, so "
                "that its free files remain: stop the training first, and try again"
            )


def _trim_ended(directory: Path) -> None:
    """Delete all but the newest states of saves that are no longer in memory."""
    files = regular_files(directory)
    by_age = sorted(files, key=lambda name: files[name].st_mtime)
    for name in by_age[:-MOST_ENDED]:
        with suppress(FileNotFoundError):
            (directory / name).unlink()


def remove_run(home: Home, run: Run) -> None:
    """Rename the run's directory before removing it, so that a trainer can create it again."""
    renamed = home.path / f"{REMOVED_RUN_PREFIX}{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        run.path.rename(renamed)
    shutil.rmtree(renamed, ignore_errors=True)


def _refuse_trainers(run: Run, force: bool) -> None:
    if not force and has_trainers(run):
        raise StoreError(
            f"run {run.name} has a trainer on this node, which would lose its snapshots: stop the "
            "training first, or pass --force"
        )


def bytes_needed_for_others(bytes_per_rank: int, options: Memory, *, nodes: int) -> int:
    """Return the bytes of copies and parity that an agent stores for each rank of its node.

    All ranks are assumed to stage a similar number of bytes.

    Args:
        bytes_per_rank: the bytes that a rank stages.
        nodes: the number of nodes of the run.
    """
    if nodes < 2:
        return 0
    groups = -(-nodes // options.group)
    members = nodes // groups
    parity = min(options.parity, members - 1)
    copied = min(options.copies, nodes - 1) * bytes_per_rank
    return options.slots * (copied + parity * -(-bytes_per_rank // (members - parity)))


def bytes_stored_for_others(run: Run) -> int:
    """Return the bytes of copies, parity and free files of the agent, without those of ranks."""
    total = sum(nbytes for nbytes, _ in Pool(run.free_directory).files(AGENT))
    for place in run.snapshots(abandoned=True):
        files, owners = regular_files(place.path), owners_of_files(place.path)
        total += sum(files[name].st_size for name in files if owners.get(name) == AGENT)
    return total
