"""By which names of files one sees that there may be something to do with a snapshot."""

from __future__ import annotations

import time

from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.agent.attempts import Seen
from shardwise.memory.node.retire import replaced
from shardwise.memory.node.tenants import rank_of
from shardwise.memory.ranks import is_present, lost_trainers


def of_sealing(seen: Seen) -> list[str]:
    """Data files that have no checksums, once no rank copies any: trainings wait for that."""
    copied = _being_copied(seen)
    return [name for name in records.unsealed(seen.names) if records.save_of(name) not in copied]


def of_committing(seen: Seen) -> list[str]:
    """Saves whose draft lies here."""
    return records.unended("commit", "draft", seen.names)


def of_protecting(seen: Seen) -> list[str]:
    """The same, once they are committed, or have failed to be."""
    saves = records.unended("protect", "draft", seen.names)
    return [save_id for save_id in saves if records.outcome("commit", save_id) in seen.names]


def of_persisting(seen: Seen) -> list[str]:
    """Saves whose draft lies here, and those that are to be rescued."""
    called = records.unended("persist", "rescue", seen.names)
    drafts = records.unended("persist", "draft", seen.names)
    return [*drafts, *(records.request("rescue", save_id) for save_id in called)]


def of_retaining(seen: Seen) -> list[str]:
    """Saves that this node has persisted, and after which older ones are to be removed."""
    return records.unended(records.RETAIN, records.RETAIN, seen.names)


def of_guarding(seen: Seen) -> list[str]:
    """Saves for which others ask this node to protect them."""
    return records.undone("protect", seen.names)


def of_copying(seen: Seen) -> list[str]:
    """Saves of which this node is asked to copy its files to storage, once all are in memory."""
    copied = _being_copied(seen)
    return [save_id for save_id in records.undone("persist", seen.names) if save_id not in copied]


def _being_copied(seen: Seen) -> set[str]:
    """The saves of which ranks of this node copy files now.

    One that was lost, or is stuck for so long that the commit has failed, is not waited for.
    """
    marks = records.being_copied(seen.names)
    return {
        records.save_of(mark)
        for mark in marks
        if records.outcome("commit", records.save_of(mark)) not in seen.names
        and is_present(seen.place.run, rank_of(mark))
    }


def of_watching(seen: Seen) -> list[str]:
    """Ranks that are lost, and what became of the newest snapshot that is committed."""
    if MANIFEST not in seen.names or any(
        MANIFEST in names for step, names in seen.run.items() if step > seen.place.step
    ):
        return []
    lost = [str(rank) for rank in lost_trainers(seen.place.run)]
    return [*lost, *filter(records.is_outcome, seen.names)] if lost else []


def of_retiring(seen: Seen) -> set[str]:
    """What decides what the newest snapshot that is committed has replaced."""
    return replaced(seen.place.step, seen.run)


def of_idling(seen: Seen) -> list[str]:
    """The second: it may be abandoned in any."""
    return [str(int(time.monotonic()))]
