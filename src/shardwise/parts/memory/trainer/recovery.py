"""Recovery: finds the newest snapshot that the remaining nodes can provide."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Sequence
from contextlib import closing
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round, unite
from shardwise.parts.memory.home import Run
from shardwise.parts.memory.observe import read_run_view
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.registry import (
    Entries,
    read_entries,
    read_newest_nodes,
    remove_earlier,
)
from shardwise.parts.memory.remote.assembled import AssembledStore, SnapshotLocations
from shardwise.parts.memory.remote.search import NodeFiles, Search, list_own_files
from shardwise.parts.memory.states import RecordCache
from shardwise.parts.memory.times import LONGEST_POLL_PAUSE, SHORT_PATIENCE

if TYPE_CHECKING:
    from shardwise.parts.memory.trainer.snapshots import Snapshots

FoundSnapshots = Generator[tuple[SnapshotLocations, AssembledStore | None], None, None]
"""Snapshots, newest first: where the files of each are, and the files."""


def find_snapshots(snapshots: Snapshots, group: Group, step: int | None) -> FoundSnapshots:
    """Yield the newest snapshot that can be read completely, and its files. All ranks call this.

    If the caller asks for another snapshot, files of the last snapshot were damaged. Newer
    snapshots are then not considered any more. The damaged snapshot is considered again if another
    node, which had not answered before, holds some of its files. The last result has no step and no
    store.

    Args:
        snapshots: the snapshots of the run.
        group: the ranks.
        step: the only step to consider; None for all steps.
    """
    damaged: int | None = None
    nodes_read: set[str] = set()
    while True:
        found = _find_assembly(snapshots, group, step, damaged, nodes_read)
        if found.step is None:
            yield found, None
            return
        nodes_read |= found.nodes.keys()
        store = AssembledStore(found, snapshots.run, snapshots.node, snapshots.tls)
        # This node's files are not freed meanwhile. One rank locks storage for all.
        with closing(store), CheckpointDirectory(store).lock_for_reading():
            yield found, store
        damaged = found.step


def _find_assembly(
    snapshots: Snapshots,
    group: Group,
    step: int | None,
    damaged_step: int | None,
    nodes_read: Collection[str],
) -> SnapshotLocations:
    """Agree on the snapshot, and return where its files are."""
    run, here = snapshots.run, snapshots.node
    complete_saves = _find_complete_saves(snapshots, group) if damaged_step is None else set()
    with Round(group, "listing snapshots") as all_ranks:
        own = _Listed()
        if snapshots.is_first_of_node:
            _wait_for_commits(run, complete_saves)
            files = list_own_files(run, here)
            own.known = set(files.known_nodes)
            own.earlier = set(run.known_nodes())
            own.nodes[group.rank] = msgspec.structs.replace(files, known_nodes=[])
        return all_ranks.all_reduce(
            own,
            _Listed,
            _combine_listed,
            lambda found: _search_nodes(snapshots, found, step, damaged_step, nodes_read),
            SnapshotLocations,
        )


@prepare_decoding
class _Listed(msgspec.Struct):
    """What some ranks know about snapshots.

    Attributes:
        nodes: the files of nodes, each by the first rank of the node.
        known: the agents of the nodes of the snapshots that they have.
        earlier: the agents of nodes that have taken part in the run.
    """

    nodes: dict[int, NodeFiles] = {}
    known: set[AgentInfo] = set()
    earlier: set[AgentInfo] = set()


def _combine_listed(parts: Sequence[_Listed]) -> _Listed:
    """Unite what ranks know. All nodes of a snapshot know the same nodes, which are kept once."""
    return _Listed(
        unite([each.nodes for each in parts]),
        set().union(*(each.known for each in parts)),
        set().union(*(each.earlier for each in parts)),
    )


def _search_nodes(
    snapshots: Snapshots,
    listed: _Listed,
    step: int | None,
    damaged_step: int | None,
    nodes_read: Collection[str],
) -> SnapshotLocations:
    """Ask further nodes as far as necessary, and choose the snapshot.

    Ask the nodes of the snapshots found so far, and the nodes that the root names as those of the
    newest snapshot. Only if their snapshots may not be the newest, ask the nodes that the root
    lists, and those that took part in the run earlier. The epoch of a node in the root may be old,
    so it does not tell whether a node has a newer snapshot: each of these nodes that does not
    answer is reported. `remove_earlier` bounds the list.

    Args:
        listed: the files of the nodes that have ranks, and other nodes.
    """
    membership, run, here = snapshots.membership, snapshots.run, snapshots.node
    nodes = [files for _, files in sorted(listed.nodes.items(), key=itemgetter(0))]
    infos = {info.node: info for info in membership.nodes}
    search = Search(run, here, nodes, infos, snapshots.tls, membership.lineage)

    def is_enough() -> bool:
        return damaged_step is None and search.is_complete(step)

    def choose() -> SnapshotLocations:
        return search.choose_snapshot(step, damaged=damaged_step, nodes_read=nodes_read)

    search.ask(is_enough, lambda: _in_order(listed.known))
    search.ask(is_enough, lambda: read_newest_nodes(snapshots.root, run.name))
    entries = Entries([], {}, {})
    if not is_enough():
        answered = {each.node for each in search.nodes}
        entries = read_entries(snapshots.root, run.name, answered)
        search.ask(is_enough, lambda: [*entries.agents, *_in_order(listed.earlier)])
    start = time.perf_counter()
    locations = choose()
    seconds = time.perf_counter() - start
    unanswered: dict[str, str] = {}
    if not is_enough():
        unanswered = entries.unreachable | {
            info.node: f"its agent at {info.url} did not answer, or another agent has replaced it"
            for info in search.unanswered
        }
    if locations.epoch is not None:
        remove_earlier(snapshots.root, run.name, locations.epoch, {n.node for n in search.nodes})
    return msgspec.structs.replace(locations, choosing_seconds=seconds, unanswered=unanswered)


def _in_order(infos: set[AgentInfo]) -> list[AgentInfo]:
    return sorted(infos, key=lambda info: (info.node, info.url))


def _find_complete_saves(snapshots: Snapshots, group: Group) -> set[str]:
    """Return the ids of the saves that all nodes have staged, so that agents will commit them."""
    with Round(group, "asking what was staged") as all_ranks:
        own: dict[str, tuple[int, int]] = {}
        for each in read_run_view(snapshots.run).snapshots if snapshots.is_first_of_node else ():
            expected = 0 if each.pending is None else len(each.pending.files)
            own[each.place.save_id] = len(each.staged), expected
        return all_ranks.all_reduce(
            own, dict[str, tuple[int, int]], _add_counts, _complete_saves, set[str]
        )


def _add_counts(messages: Sequence[dict[str, tuple[int, int]]]) -> dict[str, tuple[int, int]]:
    """Return for each save how many files are staged, and how many it has, if a node knows this."""
    total: dict[str, tuple[int, int]] = {}
    for message in messages:
        for save, (staged, expected) in message.items():
            others, known = total.get(save, (0, 0))
            total[save] = others + staged, max(known, expected)
    return total


def _complete_saves(counts: dict[str, tuple[int, int]]) -> set[str]:
    return {save for save, (staged, expected) in counts.items() if staged == expected > 0}


def _wait_for_commits(run: Run, saves: set[str]) -> None:
    """Wait, at most `SHORT_PATIENCE` seconds, until agents have committed these saves.

    A save counts as committed once its manifest is on this node. This does not wait for other
    nodes, because a node may be lost.
    """
    cache = RecordCache()

    for _ in Deadline(SHORT_PATIENCE).attempts(pause=LONGEST_POLL_PAUSE):
        if not any(
            each.place.save_id in saves
            and each.staged
            and not each.state_of("commit").has_ended
            and not each.is_committed
            for each in read_run_view(run, cache).snapshots
        ):
            return
