"""What a run leaves behind as it goes on from a step: on its nodes, and on those that are idle."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from shardwise.errors import FormatError, StateError
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Place, Run
from shardwise.memory.lineage import Lineage
from shardwise.memory.node.retire import discard


def leave_behind(
    run: Run,
    step: int | None,
    lineage: Lineage,
    nodes: Collection[str],
    slots: int,
) -> None:
    """Discard what nothing comes of any more on this node, as the run goes on from a step.

    That is what is newer; what the run has abandoned before, as this node may have been idle then;
    and what is older and not finished, as what waits for a node that is gone would hold its slot.

    Args:
        step: None for the beginning.
        lineage: where the run has gone back until now.
        nodes: that it goes on with.
        slots: how many snapshots are to be kept.

    Raises:
        StoreError: an agent does not cease to work on it.
    """
    places = [Place(run, each) for each in reversed(run.steps())]
    valid = [
        place
        for place in places
        if step is not None and place.step <= step and not is_abandoned(place, lineage)
    ]
    kept = [place for place in valid if place.step == step or _is_being_persisted(place, nodes)]
    finished = [each for each in valid if each not in kept and _is_finished(each)]
    kept += finished[: max(0, slots - len(kept))]
    discard([place for place in places if place not in kept])


def refuse_to_go_back(run: Run, step: int, lineage: Lineage) -> None:
    """Refuse a step before one that is in memory, unless the run has gone back to before that.

    Raises:
        StateError: it is one; what is in memory would be taken for newer than what is saved now.
    """
    places = [Place(run, each) for each in run.steps() if each > step]
    newer = [each for each in places if each.is_committed() and not is_abandoned(each, lineage)]
    if newer:
        raise StateError(
            f"step {step}: memory holds step {newer[-1].step} of this run, which is newer. To go "
            f"on from that, restore() first; to go back, restore(state, step=…); to begin anew, "
            "save to another root, or remove this one"
        )


def is_abandoned(place: Place, lineage: Lineage) -> bool:
    """Whether the run has gone back to before a snapshot since it was saved.

    False if that cannot be told of some save in it: it may be one that the run goes on from.
    """
    branch = lineage.newest_before(place.step)
    if branch is None:
        return False
    epochs = _epochs(place)
    return bool(epochs) and all(
        each is not None and each < branch.epoch for each in epochs.values()
    )


def _epochs(place: Place) -> dict[str, int | None]:
    """The saves of which there is something in a place, and when each was; None if unknown."""
    found: dict[str, int | None] = {}
    with suppress(FileNotFoundError, FormatError):
        found[decode_manifest((place.path / MANIFEST).read_bytes()).save_id] = None
    found |= {records.save_of(each.file.name): each.epoch for each in place.staged()}
    found |= {each.save_id: each.epoch for each in place.drafts() + place.terms()}
    return found


def _is_being_persisted(place: Place, nodes: Collection[str]) -> bool:
    """Whether a node that is there leads a save which is to be persisted in any case, and is not
    yet."""
    return place.is_committed() and any(
        draft.durable and draft.leader in nodes and place.ended("persist", draft.save_id) is None
        for draft in place.drafts() + place.terms()
    )


def _is_finished(place: Place) -> bool:
    """Whether it is a snapshot, and nothing was still to become of it."""
    wanted = {
        (stage, records.save_of(each.file.name)) for each in place.staged() for stage in each.stages
    }
    wanted |= {("persist", save) for save in records.requested("persist", place.named(".json"))}
    ended = all(place.ended(stage, save) is not None for stage, save in wanted)
    return ended and place.is_committed()
