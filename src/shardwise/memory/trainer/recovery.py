"""Recovery: finds the newest snapshot that the remaining nodes can provide."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
from contextlib import closing
from operator import itemgetter
from typing import TYPE_CHECKING

import msgspec

from shardwise.deadline import Deadline
from shardwise.engine.group import Group
from shardwise.engine.rounds import Round, concatenate
from shardwise.manifest.manifest import MANIFEST
from shardwise.memory.home import Run
from shardwise.memory.observe import RecordCache, read_run_view
from shardwise.memory.registry import read_entries
from shardwise.memory.remote.assembled import AssembledStore, Assembly
from shardwise.memory.remote.search import NodeFiles, Search, list_own_files

if TYPE_CHECKING:
    from shardwise.memory.trainer.snapshots import Snapshots

COMMIT_TIMEOUT = 5.0
POLL_PAUSE = 0.01
FoundSnapshots = Generator[tuple[Assembly, AssembledStore | None], None, None]
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
        with closing(store), store.lock(MANIFEST, shared=True):
            yield found, store
        damaged = found.step


def _find_assembly(
    snapshots: Snapshots,
    group: Group,
    step: int | None,
    damaged_step: int | None,
    nodes_read: Collection[str],
) -> Assembly:
    """Agree on the snapshot, and return where its files are."""
    run, here = snapshots.run, snapshots.node
    complete_saves = _find_complete_saves(snapshots, group) if damaged_step is None else set()
    with Round(group, "listing snapshots") as all_ranks:
        own = None
        if snapshots.is_first_of_node:
            _wait_for_commits(run, complete_saves)
            own = list_own_files(run, here)
        return all_ranks.all_reduce(
            [] if own is None else [(group.rank, own)],
            list[tuple[int, NodeFiles]],
            concatenate,
            lambda found: _search_nodes(
                snapshots,
                [files for _, files in sorted(found, key=itemgetter(0))],
                step,
                damaged_step,
                nodes_read,
            ),
            Assembly,
        )


def _search_nodes(
    snapshots: Snapshots,
    nodes: list[NodeFiles],
    step: int | None,
    damaged_step: int | None,
    nodes_read: Collection[str],
) -> Assembly:
    """Ask further nodes as far as necessary, and choose the snapshot.

    Args:
        nodes: the files of the nodes that have ranks.
    """
    membership, run, here = snapshots.membership, snapshots.run, snapshots.node
    here_or_known = {info.node for info in membership.nodes}
    others, unreachable = read_entries(snapshots.root, run.name, here_or_known)
    infos = {info.node: info for info in (*others, *membership.nodes)}
    search = Search(run, here, nodes, infos, snapshots.tls, membership.lineage)
    search.ask(lambda: damaged_step is None and search.is_complete(step))
    start = time.perf_counter()
    assembly = search.choose_snapshot(step, damaged=damaged_step, nodes_read=nodes_read)
    seconds = time.perf_counter() - start
    answered = {each.node for each in search.nodes}
    known = [*others, *(info for each in search.nodes for info in each.known_nodes)]
    silent = {
        info.node: f"its agent at {info.url} did not answer, or another agent has replaced it"
        for info in known
    }
    unanswered = {n: why for n, why in {**unreachable, **silent}.items() if n not in answered}
    if unanswered and search.is_complete(step):
        unanswered = {}
    return msgspec.structs.replace(assembly, choosing_seconds=seconds, unanswered=unanswered)


def _find_complete_saves(snapshots: Snapshots, group: Group) -> set[str]:
    """Return the ids of the saves that all nodes have staged, so that agents will commit them."""
    with Round(group, "asking what was staged") as all_ranks:
        places = snapshots.run.snapshots() if snapshots.is_first_of_node else []
        staged_files = [each.file.name for place in places for each in place.staged_files()]
        files_of_saves = [
            (pending.save_id, [name for name, _ in pending.files])
            for place in places
            for pending in place.pending_manifests()
        ]
        own = staged_files, files_of_saves
        return all_ranks.all_reduce(
            own,
            tuple[list[str], list[tuple[str, list[str]]]],
            lambda parts: (
                concatenate([names for names, _ in parts]),
                concatenate([saves for _, saves in parts]),
            ),
            _complete_saves,
            set[str],
        )


def _complete_saves(staged: tuple[list[str], list[tuple[str, list[str]]]]) -> set[str]:
    """Return the ids of the saves of which all files are staged."""
    names, saves = set(staged[0]), staged[1]
    return {save for save, files in saves if names.issuperset(files)}


def _wait_for_commits(run: Run, saves: set[str]) -> None:
    """Wait, at most `COMMIT_TIMEOUT` seconds, until agents have committed these saves.

    A save counts as committed once its manifest is on this node. This does not wait for other
    nodes, because a node may be lost.
    """
    cache = RecordCache()

    for _ in Deadline(COMMIT_TIMEOUT).attempts(pause=POLL_PAUSE):
        if not any(
            save.save_id in saves
            and save.has_staged
            and not save.state_of("commit").has_ended
            and snapshot.committed_save != save.save_id
            for snapshot in read_run_view(run, cache).snapshots
            for save in snapshot.saves.values()
        ):
            return
