"""Frees memory: slots return to the pool, and everything else is deleted.

`decide.py` decides what to free; this module frees it, for agents and for trainers. A snapshot is
freed under an exclusive lock of its directory, so never while it is in use. Pending manifests are
removed first, so that no work resumes. Records that name slots are removed last, so that a process
that is killed in between loses no memory.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.errors import StateError, StoreError
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.decide import hopeless_steps, is_superseded, superseded_steps
from shardwise.memory.home import (
    ENDED,
    ROOT,
    Home,
    Place,
    Run,
    SnapshotHeld,
    hold,
    read_record,
    write_record,
)
from shardwise.memory.identity import node_name
from shardwise.memory.lineage import Lineage
from shardwise.memory.observe import RecordCache, read_snapshot, view_run
from shardwise.memory.options import Memory
from shardwise.memory.ranks import has_trainers, is_present
from shardwise.memory.records import rank_of
from shardwise.memory.registry import forget
from shardwise.store import LocalStore

SLOT, SPARE = ".slot", ".spare"
ASIDE = "vacant-"
REMEMBERED = 64
AT_ONCE, PATIENCE = 0.05, 30.0
POLL = 0.002
log = logging.getLogger("shardwise")


def free(place: Place, patience: float = AT_ONCE, *, wholly: bool = True) -> bool:
    """Free a snapshot; return False if it is still in use after `patience` seconds.

    Args:
        wholly: whether to remove a pending request to remove old checkpoints from storage, too.
    """
    deadline = time.monotonic() + patience
    while True:
        with place.hold(shared=False) as held:
            if held:
                return _free(place, wholly)
        if not place.path.exists() or time.monotonic() > deadline:
            return False
        time.sleep(POLL)


def _free(place: Place, wholly: bool) -> bool:
    store = LocalStore(place.path)
    if place.is_committed():
        with store.hold(MANIFEST, shared=False) as held:
            if not held:
                return False
            store.delete(MANIFEST)
    names = store.list()
    asked = [] if wholly else records.unended(records.RETAIN, records.RETAIN, names)
    stay = {records.request(records.RETAIN, save_id) for save_id in asked}
    _remove(place, [name for name in names if name not in stay])
    with suppress(OSError):
        store.remove()
    return True


def free_replaced(place: Place) -> None:
    """Free a snapshot that newer ones have replaced, and slots that are no longer needed.

    Raises:
        SnapshotHeld: the snapshot is in use. It is marked as abandoned.
    """
    if not free(place, wholly=False):
        if not place.path.exists():
            return
        place.abandon()
        raise SnapshotHeld(place)
    run = place.run
    newest = next((p for s in reversed(run.steps()) if (p := Place(run, s)).is_committed()), None)
    if newest is not None:
        # If no rank is alive, those with a share of the newest snapshot here may return.
        expected = {rank_of(name) for name in newest.named(records.STAGED)}
        evict(run, lambda rank: rank in expected or is_present(run, rank))
    made = [len(_made_by_agent(Place(run, each).named(""))) for each in run.steps()]
    trim_spares(run, max(made, default=0))


def free_unattended(place: Place) -> None:
    """Free a snapshot of a run without trainers on this node, and all its free slots.

    Raises:
        SnapshotHeld: the snapshot is in use. It is marked as abandoned.
    """
    place.abandon()
    if not free(place):
        if place.path.exists():
            raise SnapshotHeld(place)
        return
    evict(place.run, lambda _: False)


def free_saves(place: Place, saves: Collection[str]) -> None:
    """Remove the files of saves that another save of the same step has replaced.

    Raises:
        SnapshotHeld: the snapshot is in use.
    """
    with place.hold(shared=False) as held:
        if not held:
            raise SnapshotHeld(place)
        names = os.listdir(place.path)
        _remove(place, [name for name in names if any(each in name for each in saves)])


def discard(places: Sequence[Place]) -> None:
    """Free snapshots, even if stages are open.

    Raises:
        StoreError: the agent does not release a snapshot.
    """
    for place in places:
        place.abandon()
    for place in places:
        if not free(place, PATIENCE) and place.path.exists():
            raise StoreError(
                f"timed out after {PATIENCE:.0f} s waiting for the lock of {place.path}: "
                "the agent of this node is using the snapshot; see its log, and try again"
            )


def discard_all(run: Run) -> None:
    """Free all snapshots of a run.

    Raises:
        StoreError: the agent does not release a snapshot.
    """
    discard([Place(run, each) for each in run.steps()])


def discard_superseded(
    run: Run, step: int | None, lineage: Lineage, nodes: Collection[str], slots: int
) -> None:
    """Free what this node need not keep when a run is resumed from a step (`superseded_steps`).

    Raises:
        StoreError: the agent does not release a snapshot.
    """
    discard(superseded_steps(view_run(run), step, lineage, nodes, slots))


def refuse_older_step(run: Run, step: int, lineage: Lineage) -> None:
    """Raise if memory holds a newer step that the run has not abandoned.

    Raises:
        StateError: it does; the newer snapshots would be taken for newer than the save.
    """
    snapshots = [read_snapshot(Place(run, each)) for each in run.steps() if each > step]
    newer = [
        each.step for each in snapshots if each.is_committed and not is_superseded(each, lineage)
    ]
    if newer:
        raise StateError(
            f"step {step}: memory holds step {newer[-1]} of this run, which is newer. To "
            "resume from that step, restore() first; to go back, restore(state, step=…); to start "
            "over, save to another root, or remove this one"
        )


def free_hopeless(run: Run, patience: float, cache: RecordCache) -> None:
    """Free snapshots that will never be committed (`hopeless_steps`)."""
    for place in hopeless_steps(view_run(run, cache), time.time(), patience):
        place.abandon()
        free(place)


def remove_if_vacant(home: Home, run: Run) -> None:
    """Remove a run that has neither trainers nor snapshots.

    A trainer that starts at the same time locks the directory first, or begins a new one.
    """
    with hold(run.path, shared=False) as alone:
        if alone and _is_vacant(run):
            forget(run, node_name(home))
            _remove_run(home, run)


def remove_leftovers(home: Home) -> None:
    """Finish removing runs whose removal was interrupted."""
    for left in home.path.glob(f"{ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)


def remove_other_runs(home: Home, run: Run, root: str) -> None:
    """Remove other runs of the same root, which was emptied since: nothing can resume from them.

    A run is kept if it has a trainer on this node, or if the agent does not release its snapshots.
    """
    write_record(run.path / ROOT, root)
    for name in home.runs():
        if name != run.name and _is_of(home, name, root):
            other = home.run(name)
            if has_trainers(other):
                continue
            try:
                discard_all(other)
            except StoreError as error:
                log.warning("cannot remove run %s of the same root: %s", name, error)
                continue
            shutil.rmtree(other.path, ignore_errors=True)


def clear_run(home: Home, run: Run, *, force: bool) -> None:
    """Remove everything that a node stores for a run.

    Args:
        force: whether to remove it even if a trainer of the run is alive on the node.

    Raises:
        StoreError: a trainer is alive, or the agent does not release a snapshot.
    """
    _refuse_trainers(run, force)
    discard_all(run)
    with hold(run.path, shared=False) as alone:
        _refuse_trainers(run, force)
        if alone:
            _remove_run(home, run)
        elif run.path.exists():
            raise StoreError(
                f"run {run.name}: a trainer has just started; kept the rest of the run"
            )


def evict(run: Run, stays: Callable[[int], bool]) -> None:
    """Delete the free slots of ranks that have left this node."""
    with suppress(FileNotFoundError):
        for name in os.listdir(run.free):
            if name.endswith(SLOT) and not stays(rank_of(name)):
                (run.free / name).unlink(missing_ok=True)


def spare(run: Run, path: Path) -> None:
    """Move a file that the agent made into the pool of spare files."""
    path.rename(run.free / f"{secrets.token_hex(8)}{SPARE}")


def spares(run: Run) -> list[tuple[int, Path]]:
    """Return the spare files and their sizes, in ascending order of size."""
    found = []
    with suppress(FileNotFoundError), os.scandir(run.free) as entries:
        for entry in entries:
            if entry.name.endswith(SPARE):
                with suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_size, Path(entry.path)))
    return sorted(found)


def take_spare(run: Run, size: int, to: Path) -> None:
    """Move a spare file to the path at which the agent writes a file of `size` bytes.

    It takes the smallest file that is large enough, or else the largest. It does nothing if the
    pool is
    empty or the path exists.
    """
    waiting = spares(run)
    large = [path for nbytes, path in waiting if nbytes >= size]
    small = [path for nbytes, path in reversed(waiting) if nbytes < size]
    for path in (*large, *small):
        if to.exists():
            return
        with suppress(FileNotFoundError):  # the whole run was removed
            path.rename(to)


def trim_spares(run: Run, most: int) -> None:
    """Delete all but the `most` largest spare files."""
    waiting = spares(run)
    for _, path in waiting[: max(0, len(waiting) - most)]:
        path.unlink(missing_ok=True)


def needed_for_others(share: int, options: Memory, *, nodes: int) -> int:
    """Return how many bytes agents store for other nodes, per rank that stages `share` bytes.

    A node stores as much for others as others store for it, if all shares are of similar size.
    """
    if nodes < 2:
        return 0
    members = nodes // -(-nodes // options.group)
    parity = min(options.parity, members - 1)
    copies = min(options.copies, nodes - 1) * share
    return options.slots * (copies + parity * -(-share // (members - parity)))


def taken_for_others(run: Run) -> int:
    """Return how many bytes a node already stores for others, not counting slots."""
    total = sum(nbytes for nbytes, _ in spares(run))
    for step in run.steps():
        place = Place(run, step)
        in_slots = {each.file.name for each in place.staged()}
        for kept in place.kept():
            in_slots |= {kept.file, kept.file.removeprefix(".")}
        for name in place.named(""):
            if name.endswith(records.DATA) and name not in in_slots:
                with suppress(FileNotFoundError):
                    total += (place.path / name).stat().st_size
    return total


def _remove(place: Place, names: list[str]) -> None:
    """Return slots and the agent's files to the pool, keep outcomes, and delete everything else."""
    slots = {staged.file.name: staged.slot for staged in place.staged()}
    for kept in place.kept():
        slots |= {kept.file: kept.slot, kept.file.removeprefix("."): kept.slot}
    place.run.free.mkdir(exist_ok=True)
    ended = place.run.path / ENDED
    ended.mkdir(exist_ok=True)
    made = _made_by_agent(names)
    for name in sorted(names, key=_removal_order):
        path = place.path / name
        with suppress(FileNotFoundError):
            if name in slots:
                path.rename(place.run.free / slots[name])
            elif name in made:
                spare(place.run, path)
            elif records.is_outcome(name):
                path.rename(ended / name)
            else:
                path.unlink()
    _trim_outcomes(ended)


def _removal_order(name: str) -> int:
    if records.requested("pending", [name]):
        return 0
    return 2 if records.names_slot(name) or records.is_outcome(name) else 1


def _made_by_agent(names: Collection[str]) -> set[str]:
    """Return the data files that the agent made for other nodes: no rank here staged them."""
    return {
        name
        for name in names
        if name.endswith(records.DATA)
        and records.staged(name) not in names
        and records.entry(name) not in names
    }


def _trim_outcomes(ended: Path) -> None:
    """Delete all but the newest outcomes."""
    with os.scandir(ended) as found:
        by_age = sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)
    for each in by_age[REMEMBERED:]:
        with suppress(FileNotFoundError):
            os.unlink(each.path)


def _remove_run(home: Home, run: Run) -> None:
    """Rename the run's directory before removing it, so that a trainer can begin the run again."""
    aside = home.path / f"{ASIDE}{secrets.token_hex(4)}"
    run.path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _is_vacant(run: Run) -> bool:
    return not run.steps() and not has_trainers(run)


def _is_of(home: Home, name: str, root: str) -> bool:
    with suppress(StoreError):  # not a run, or its record is damaged
        return read_record(home.run(name).path / ROOT, str) == root
    return False


def _refuse_trainers(run: Run, force: bool) -> None:
    if not force and has_trainers(run):
        raise StoreError(
            f"run {run.name} has a trainer on this node, which would lose its snapshots: stop the "
            "training first, or pass --force"
        )
