"""Agree on the reads that nodes share, so that bytes that several nodes want are read only once.

Each rank knows the other ranks of its node. The ranks exchange two messages through rank 0:

1. Each rank sends its address. The first rank of each node also sends the byte ranges that the node
   wants. Rank 0 replies with all addresses and the distinct lists. From these, every rank computes
   the same division (`share_between_nodes`). If sharing would spare little, the reply is empty.
2. The ranks connect. If one cannot, every node reads alone.
"""

from __future__ import annotations

import logging
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round, unite
from shardwise.kernel.errors import LostRankError
from shardwise.kernel.plan.load import Ranges
from shardwise.parts.ranks.connections import TOKEN_SIZE, listen_for_ranks
from shardwise.parts.sharing.links import OPERATION, Links, connect
from shardwise.parts.sharing.node_ranks import NodeRanks, decode_ranges, encode_ranges
from shardwise.parts.sharing.reads import NO_RANK, Reads, share_between_nodes, unite_ranges

WORTH_SHARING = 0.05
"""Nodes, and ranks of a node, share their reads if this avoids at least this fraction of bytes."""
FEWEST_BYTES_SPARED = 64 << 20
"""By default, sharing must also avoid reading at least this many bytes, or nodes do not connect."""
LARGEST_LISTS = 1 << 30
"""The limit on the sum of the sizes of all lists of byte ranges that rank 0 receives, in bytes."""
CONNECT_SECONDS = 30.0

log = logging.getLogger("shardwise")


@prepare_decoding
class _Offer(msgspec.Struct, array_like=True):
    """The first message of a rank.

    Attributes:
        first: the first rank of its node.
        address: the host and port at which it listens.
        wanted: the encoded byte ranges that its node wants; empty if the node reads alone, or if
            this rank is not the first of its node.
        token: a secret. That of rank 0 is used for all connections.
    """

    first: int
    address: tuple[str, int]
    wanted: bytes
    token: bytes


@prepare_decoding
class _Division(msgspec.Struct, array_like=True):
    """What all nodes want, from which all ranks compute the same division of the reads.

    Attributes:
        lists: the different lists of byte ranges, encoded.
        list_of_node: the index in `lists` of each node's list.
        ranks: the ranks of each node.
        addresses: the address of each rank, by rank.
        largest_read: the greatest length of a read of each file in bytes, as int64.
        token: the secret of all connections.
    """

    lists: list[bytes]
    list_of_node: list[int]
    ranks: list[list[int]]
    addresses: dict[int, tuple[str, int]]
    largest_read: bytes
    token: bytes

    def wanted(self) -> list[Ranges]:
        """Return the different lists of byte ranges."""
        return [decode_ranges(zlib.decompress(each)) for each in self.lists]

    def divide(self, wanted: Sequence[Ranges], node: int) -> tuple[Reads, int]:
        """Return the reads of a node; see `share_between_nodes`."""
        largest = np.frombuffer(self.largest_read, np.int64)
        lists = self.list_of_node
        return share_between_nodes(wanted, lists, self.ranks, node, largest_read=largest)


def agree_on_reading_once(
    group: Group, node: NodeRanks, cleanup: ExitStack, *, may_share: bool, read_once: bool | None
) -> tuple[Reads, Links] | None:
    """Agree on the reads that nodes share. All ranks call this function together.

    Args:
        group: the ranks of the nodes that may share their reads: those of `node.neighbors`.
        node: the ranks of this node.
        cleanup: closes the connections.
        may_share: whether this node shares its reads.
        read_once: True to share reads if this spares at least 5 % of the bytes. None to require
            also that sharing spares `FEWEST_BYTES_SPARED` bytes.

    Returns:
        The reads of this node, and the connections of this rank; None if every node reads alone.

    Raises:
        RankError: a rank failed; with `read_once`, also if a rank cannot connect to another.
        LostRankError: a rank died, or did not answer in time.
    """
    least = 1 if read_once else FEWEST_BYTES_SPARED
    with Round(group, "planning shared reads") as all_ranks:
        address, listener = listen_for_ranks(cleanup)
        wanted = b""
        if may_share and node.local_rank == 0:
            wanted = zlib.compress(encode_ranges(unite_ranges(node.wanted)), 1)
            if len(wanted) > LARGEST_LISTS * len(node) // group.size:
                wanted = b""
        offer = _Offer(node.ranks[0], address, wanted, secrets.token_bytes(TOKEN_SIZE))
        found = all_ranks.all_reduce(
            {node.rank: offer},
            dict[int, _Offer],
            unite,
            lambda offers: _divide(dict(sorted(offers.items())), node.largest_read, least),
            list[_Division],
        )
    if not found:
        if read_once and group.rank == 0:
            log.warning(
                "read_once=True: every node reads alone, because a node has all files, or sharing "
                "would spare less than %.0f %% of the reads",
                100 * WORTH_SHARING,
            )
        return None
    (division,) = found
    reads, _ = division.divide(division.wanted(), division.ranks.index(node.ranks))
    with Round(group, "connecting") as all_ranks:
        links, failure = None, ""
        try:
            links = _connect(node, reads, division, listener, cleanup)
        except LostRankError as error:
            if read_once:
                raise
            failure = str(error)
        failure = all_ranks.all_reduce(failure, str, max)
    if failure and group.rank == 0:
        log.warning("every node reads alone, because %s", failure)
    return None if failure or links is None else (reads, links)


def _divide(offers: Mapping[int, _Offer], largest_read: IntArray, least: int) -> list[_Division]:
    """Return the division of the reads; nothing if sharing spares fewer bytes than `least`."""
    ranks_of: dict[int, list[int]] = {}
    for rank, offer in offers.items():
        ranks_of.setdefault(offer.first, []).append(rank)
    lists = [offers[first].wanted for first in ranks_of]
    if not all(lists):
        return []
    numbers = {each: number for number, each in enumerate(dict.fromkeys(lists))}
    division = _Division(
        lists=list(numbers),
        list_of_node=[numbers[each] for each in lists],
        ranks=list(ranks_of.values()),
        addresses={rank: offer.address for rank, offer in offers.items()},
        largest_read=largest_read.tobytes(),
        token=next(iter(offers.values())).token,
    )
    wanted = division.wanted()
    _, saved = division.divide(wanted, 0)
    nbytes = sum(wanted[number].nbytes for number in division.list_of_node)
    return [division] if saved >= max(least, WORTH_SHARING * nbytes) else []


def _connect(
    node: NodeRanks,
    reads: Reads,
    division: _Division,
    listener: socket.socket,
    cleanup: ExitStack,
) -> Links:
    """Connect this rank to those that it receives from, and sends to."""
    is_own = reads.reader == node.local_rank
    sources = set(reads.source[is_own].tolist()) - {NO_RANK}
    targets = sorted(set(reads.target[is_own].tolist()) - {NO_RANK})
    addresses = {target: division.addresses[target] for target in targets}
    # Half of the group's timeout, because a rank that could not connect waits for this rank.
    timeout = min(CONNECT_SECONDS, node.timeout / 2)
    try:
        outgoing, incoming = connect(
            node.rank, addresses, sources, listener, division.token, timeout, cleanup
        )
    except LostRankError as error:
        advice = "open the ports between nodes, or pass read_once=False"
        raise LostRankError(
            OPERATION, {rank: f"{why}; {advice}" for rank, why in error.failures.items()}
        ) from error
    return Links(outgoing, incoming, node)
