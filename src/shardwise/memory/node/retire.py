"""Snapshots that are no longer kept: their slots go back to wait, and the rest is removed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from shardwise.errors import StoreError
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Held, Place, Run
from shardwise.memory.node.spares import spare, trim_spares
from shardwise.memory.node.tenants import evict_movers
from shardwise.store import LocalStore

ENDED = "ended"
REMEMBERED = 64
PATIENCE, LONG = 0.05, 30.0
POLL = 0.002


def replaced(step: int, run: Mapping[int, Collection[str]]) -> set[str]:
    """What decides which snapshots the newest that is committed has replaced; nothing of another.

    Args:
        run: the names of the files of all snapshots of the run, by step.
    """
    committed = [each for each, names in run.items() if MANIFEST in names]
    if not committed or step != max(committed):
        return set()
    return {
        f"{each}/{name}"
        for each, names in run.items()
        for name in names
        if name == MANIFEST or records.is_outcome(name)
    }


def retire_replaced(place: Place) -> bool:
    """Retire what the newest committed snapshot has replaced, unless it is read or persisted now.

    As many committed snapshots stay as the records beside the newest of them say, and none of the
    files of one that is committed is touched; one that never was goes when a newer one is. One
    after which storage is still to be tidied leaves the record that asks for it.

    Raises:
        Held: some are to be retired, and others work on them.
    """
    run = place.run
    steps = run.steps()
    committed = [s for s in steps if Place(run, s).is_committed()]
    if not committed or place.step != committed[-1]:
        return False
    kept = _kept(run, committed)
    others = (Place(run, s) for s in steps if s < place.step and s not in kept)
    old = [each for each in others if not _is_busy(each)]
    held = [each for each in old if not retire(each, PATIENCE, wholly=False)]
    for each in held:
        each.abandon()  # what is still being done is of no use, such as to rescue it
    if len(held) < len(old):
        evict_movers(place)
        made = [len(_of_agents(Place(run, each).named(""))) for each in run.steps()]
        trim_spares(run, max(made, default=0))
    tidied = [_tidy(Place(run, each)) for each in sorted(kept)]
    if held:
        raise Held(place)
    return any(not each.path.exists() for each in old) or any(tidied)


def _kept(run: Run, committed: list[int]) -> set[int]:
    """The newest, the newest that is protected, those that are worked on now, and as many more as
    there are slots."""
    slots = max((each.slots for each in Place(run, committed[-1]).staged()), default=2)
    kept = {committed[-1], *(each for each in committed if _is_busy(Place(run, each)))}
    protected = (step for step in reversed(committed) if _is_protected(Place(run, step)))
    kept |= set(islice(protected, 1))
    for each in reversed(committed):
        if len(kept) >= slots:
            break
        kept.add(each)
    return kept


def _is_protected(place: Place) -> bool:
    ended = [place.ended("protect", save_id) for save_id in place.saves()]
    return any(done is not None and not done.failure for done in ended)


def retire(place: Place, patience: float, *, wholly: bool = True) -> bool:
    """Retire a snapshot; whether nobody worked on it, or ceased to within so many seconds.

    Args:
        wholly: storage is not to be tidied after it any more.
    """
    deadline = time.monotonic() + patience
    while True:
        with place.hold(shared=False) as held:
            if held:
                return _retire(place, wholly)
        if not place.path.exists() or time.monotonic() > deadline:
            return False
        time.sleep(POLL)


def _retire(place: Place, wholly: bool) -> bool:
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


def discard_newer(run: Run, step: int | None) -> None:
    """Retire what is newer than the step that a run goes on from; all, if that is None.

    Raises:
        StoreError: an agent does not cease to work on it.
    """
    discard([Place(run, each) for each in run.steps() if step is None or each > step])


def discard(places: Sequence[Place]) -> None:
    """Retire snapshots, whatever was still to become of them.

    Raises:
        StoreError: an agent does not cease to work on one.
    """
    for place in places:
        place.abandon()
    for place in places:
        if not retire(place, LONG) and place.path.exists():
            raise StoreError(
                f"{place.path}: its agent has worked on it for {LONG:.0f} s, so that it cannot "
                "be discarded, as it is to be"
            )


def give_up_failed(run: Run, patience: float) -> None:
    """Retire snapshots that will never be committed: all but the newest step, whose commit has
    failed, or, of those for memory alone, of which nothing was heard for so many seconds."""
    for step in run.steps()[:-1]:
        place = Place(run, step)
        staged = place.staged()
        if place.is_committed() or not staged:
            continue
        ended = [place.ended("commit", save_id) for save_id in place.saves()]
        failed = all(done is not None and done.failure for done in ended)
        durable = any("persist" in each.stages for each in staged)
        if failed or (not durable and place.age() > patience):
            place.abandon()
            retire(place, PATIENCE)


def _is_busy(place: Place) -> bool:
    """Whether something is still to become of it that has not become of a newer one already.

    What its agent has promised to persist has to be, whatever has become of newer ones.
    """
    names = set(place.named(".json"))
    waited_for = {
        (stage, save_id)
        for staged in place.staged()
        for save_id in [records.save_of(staged.file.name)]
        for stage in staged.stages
        if records.outcome(stage, save_id) not in names
    }
    if not waited_for:
        return False
    promised = {save for stage, save in waited_for if stage == "persist"}
    leads = any(records.draft(save) in names for save in promised)
    if leads and any(each.durable and each.save_id in promised for each in place.drafts()):
        return True
    newer = [Place(place.run, each) for each in place.run.steps() if each > place.step]
    return not all(any(each.has_ended(stage) for each in newer) for stage, _ in waited_for)


def _tidy(place: Place) -> bool:
    """Remove what is left of other saves of a step that is committed now.

    Raises:
        Held: others work on it.
    """
    by_save = place.saves()
    if len(by_save) < 2:
        return False
    # The manifest is looked at last: a save whose commit has ended before has its own there, or is
    # replaced. The other way round, one that is committed in between would be taken for old.
    ended = {save_id for save_id in by_save if place.ended("commit", save_id) is not None}
    old = ended - {decode_manifest((place.path / MANIFEST).read_bytes()).save_id}
    if not old:
        return False
    with place.hold(shared=False) as held:
        if not held:
            raise Held(place)
        _remove(place, [name for name in os.listdir(place.path) if any(o in name for o in old)])
    return True


def _remove(place: Place, names: list[str]) -> None:
    slots = {staged.file.name: staged.slot for staged in place.staged()}
    for kept in place.kept():
        slots |= {kept.file: kept.slot, kept.file.removeprefix("."): kept.slot}
    place.run.free.mkdir(exist_ok=True)
    ended = place.run.path / ENDED
    ended.mkdir(exist_ok=True)
    of_agents = _of_agents(names)
    for name in sorted(names, key=_records_last):
        path = place.path / name
        with suppress(FileNotFoundError):
            if name in slots:
                path.rename(place.run.free / slots[name])
            elif name in of_agents:
                spare(place.run, path)
            elif records.is_outcome(name):
                path.rename(ended / name)
            else:
                path.unlink()
    _forget(ended)


def _of_agents(names: Collection[str]) -> set[str]:
    """The data files that no rank of this node has staged, but its agent has made for others."""
    files = {name for name in names if name.endswith(records.DATA)}
    return {
        name
        for name in files
        if records.staged(name) not in names and records.entry(name) not in names
    }


def _records_last(name: str) -> int:
    """Drafts go first, so that nobody goes on; what slots are called goes last."""
    if name.startswith("draft-"):
        return 0
    return 2 if records.names_slot(name) or records.is_outcome(name) else 1


def _forget(ended: os.PathLike[str]) -> None:
    """Keep the newest outcomes only."""
    with os.scandir(ended) as found:
        by_age = sorted(found, key=lambda each: each.stat().st_mtime, reverse=True)
    for each in by_age[REMEMBERED:]:
        with suppress(FileNotFoundError):
            os.unlink(each.path)
