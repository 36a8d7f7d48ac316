"""Replies of nodes that were called to do their part of a stage, as columns; how they combine.

A reply covers a node and the nodes below it in the tree. Two replies may cover the same node: if a
node was silent for a while, its parent has asked the nodes below it too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import LARGEST_INTEGER, FileEntry
from shardwise.parts.memory.records import PendingManifest, SubtreeReply, rank_in_name

MOST_REASONS = 16
LONGEST_REASON = 2000
_FIELDS = ("size", "data_at", "objects_at", "checksums_at", "checksums_crc32")
Column = npt.NDArray[np.int64]


def _empty() -> Column:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Replies:
    """What nodes did for a stage.

    Attributes:
        nodes: the indices of the nodes that did their part, in ascending order.
        nbytes: the bytes that each of them processed.
        files: the indices of sealed files, in ascending order.
        entries: a row for each of these files, with the `_FIELDS` of its entry.
        failures: for the first nodes that failed to do their part, the reasons.
        lost: for the first nodes that did not answer, what was wrong.
    """

    nodes: Column = field(default_factory=_empty)
    nbytes: Column = field(default_factory=_empty)
    files: Column = field(default_factory=_empty)
    entries: Column = field(default_factory=lambda: np.zeros((0, len(_FIELDS)), np.int64))
    failures: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_node(cls, index: int, nbytes: int, entries: Mapping[int, FileEntry]) -> Replies:
        """Return the reply of a single node.

        Args:
            index: the index of the node.
            nbytes: the bytes that it processed.
            entries: the entries of its files by index, if the save is being committed.
        """
        rows = [[getattr(entries[each], name) for name in _FIELDS] for each in sorted(entries)]
        return cls(
            np.array([index], np.int64),
            np.array([nbytes], np.int64),
            np.array(sorted(entries), np.int64),
            np.array(rows, np.int64).reshape(-1, len(_FIELDS)),
        )

    @classmethod
    def decode(cls, reply: SubtreeReply, pending: PendingManifest) -> Replies:
        """Return the columns of a record.

        Raises:
            StoreError: they are not columns of the nodes and files of this save.
        """
        try:
            found = cls(
                np.frombuffer(reply.nodes, "<u4").astype(np.int64),
                np.frombuffer(reply.nbytes, "<u8").astype(np.int64),
                np.frombuffer(reply.files, "<u4").astype(np.int64),
                np.frombuffer(reply.entries, "<u8").astype(np.int64).reshape(-1, len(_FIELDS)),
                _first(reply.failures.items()),
                _first(reply.lost.items()),
            )
        except ValueError as error:
            raise _invalid(reply, str(error)) from error
        numbers = np.concatenate([found.nbytes, found.entries.reshape(-1)])
        if (
            reply.save_id != pending.save_id
            or len(found.nodes) != len(found.nbytes)
            or len(found.files) != len(found.entries)
            or not _are_indices(found.nodes, len(pending.nodes))
            or not _are_indices(found.files, len(pending.files))
            or bool(((numbers < 0) | (numbers > LARGEST_INTEGER)).any())
        ):
            raise _invalid(reply, "its columns do not belong together, or to another save")
        return found

    def encode(self, save_id: str) -> SubtreeReply:
        """Return the record of these replies."""
        return SubtreeReply(
            save_id=save_id,
            nodes=self.nodes.astype("<u4").tobytes(),
            nbytes=self.nbytes.astype("<u8").tobytes(),
            files=self.files.astype("<u4").tobytes(),
            entries=self.entries.astype("<u8").tobytes(),
            failures=dict(self.failures),
            lost=dict(self.lost),
        )

    def file_entries(self, pending: PendingManifest) -> dict[str, FileEntry]:
        """Return the entries of the sealed files by name."""
        found = {}
        for index, row in zip(self.files.tolist(), self.entries.tolist(), strict=True):
            name, _ = pending.files[index]
            found[name] = FileEntry(name, rank_in_name(name), *row)
        return found

    def names_of_nodes(self, pending: PendingManifest) -> set[str]:
        """Return the names of the nodes that did their part."""
        return {pending.nodes[index].node for index in self.nodes.tolist()}


def combine_replies(
    replies: Sequence[Replies], pending: PendingManifest, answered: Collection[str] = ()
) -> Replies:
    """Combine replies, which may cover the same nodes. The order of the replies does not matter.

    A node that one reply gives as lost is not lost if another reply covers it. Of the reasons,
    those of `MOST_REASONS` nodes are kept, the first by name.

    Args:
        pending: the pending manifest of the save.
        answered: the names of nodes that answered, although no reply covers them.
    """
    nodes, first_nodes = _unique([each.nodes for each in replies])
    files, first_files = _unique([each.files for each in replies])
    nbytes = [each.nbytes for each in replies]
    entries = [each.entries for each in replies]
    lost = [item for each in replies for item in each.lost.items()]
    present = {pending.nodes[index].node for index in nodes.tolist() if lost}.union(answered)
    return Replies(
        nodes,
        np.concatenate([_empty(), *nbytes])[first_nodes],
        files,
        np.concatenate([Replies().entries, *entries])[first_files],
        _first(item for each in replies for item in each.failures.items()),
        _first((node, reason) for node, reason in lost if node not in present),
    )


def _first(reasons: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the reasons of the first nodes by name, cut off if they are long."""
    shortened = {(node, reason[:LONGEST_REASON]) for node, reason in reasons}
    return dict(islice(dict(sorted(shortened)).items(), MOST_REASONS))


def _unique(columns: Sequence[Column]) -> tuple[Column, Column]:
    """Return the different values of columns, and where each of them is first."""
    return np.unique(np.concatenate([_empty(), *columns]), return_index=True)


def _are_indices(values: Column, count: int) -> bool:
    """Return whether values ascend, and are in `range(count)`."""
    ascend = bool((values[1:] > values[:-1]).all())
    return ascend and (len(values) == 0 or bool(values[0] >= 0 and values[-1] < count))


def _invalid(reply: SubtreeReply, problem: str) -> StoreError:
    return StoreError(
        f"a reply about save {reply.save_id} is invalid: {problem}; make sure that all nodes run "
        "the same version of shardwise"
    )
