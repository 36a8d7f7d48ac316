"""Agree on how nodes share reads, so that bytes that several nodes want are read only once.

Each rank knows the other ranks of its node. The ranks exchange up to four messages through rank 0:

1. Each rank sends its address. The first rank of each node also sends a digest of the byte ranges
   that the node wants. Rank 0 chooses one node for each different digest. If there is nothing to
   share, the exchange ends here.
2. The first ranks of these nodes send the byte ranges. Rank 0 divides them (`share_between_nodes`).
   It replies to the first rank of each node with the plan of the node (what the node reads,
   receives and sends) and with the addresses of its neighbours. The first rank passes both on to
   the other ranks of its node.
3. The ranks connect, and measure the rate of the network.
4. Unless the user has chosen, all ranks measure the rate of the storage at the same time. Rank 0
   decides by both rates whether the nodes share their reads.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.engine.exchange import exchange, exchange_with_local_value
from shardwise.engine.group import Group, listen, own_address
from shardwise.errors import LostRankError
from shardwise.layout.columns import Int
from shardwise.sharing.between_nodes import (
    NOBODY,
    NodeRates,
    ReadsBetweenNodes,
    ReadsOfNode,
    is_sharing_faster,
    reads_of_node,
    share_between_nodes,
)
from shardwise.sharing.connections import (
    OPERATION,
    TOKEN_SIZE,
    Connections,
    connect,
    measure_network,
)
from shardwise.sharing.links import Links
from shardwise.sharing.node_ranks import NodeRanks
from shardwise.sharing.ranges import Ranges, unite_ranges

WORTH_SHARING = 0.05
"""Nodes share their reads if this spares at least this fraction of the bytes to read."""
WORTH_MEASURING = 64 << 20
"""The rates are measured if sharing spares all nodes together at least so many bytes to read."""
LARGEST_LISTS = 1 << 30
"""The limit on the sum of the sizes of all lists of byte ranges that rank 0 receives, in bytes."""
CONNECT_SECONDS = 30.0
DIGEST_SIZE = 16
LOOPBACK = "127.0.0.1"
YES = b"\1"
SEE_FIRST_RANK = b"\0"
"""The reply to ranks that are not the first of their node."""

log = logging.getLogger("shardwise")


@prepare_decoding
class _Offer(msgspec.Struct, array_like=True):
    """The first message of a rank.

    Attributes:
        first: the first rank of its node.
        host, port: the address at which it listens.
        may_share: whether its node may share its reads.
        digest: a digest of what its node wants; empty if this rank is not the first of its node.
        nbytes: the number of bytes that its node wants.
        list_size: the size of the encoded list of byte ranges, in bytes.
    """

    first: int
    host: str
    port: int
    may_share: bool
    digest: bytes = b""
    nbytes: int = 0
    list_size: int = 0


class _Peer(msgspec.Struct, array_like=True):
    """A rank of a neighbouring node, and its address."""

    rank: int
    host: str
    port: int


@prepare_decoding
class _Plan(msgspec.Struct, array_like=True):
    """What a node shares with other nodes; rank 0 sends it to the first rank of the node.

    Attributes:
        node: the index of the node.
        peers: the ranks of this node and of its neighbours, by the index of their node.
        token: the secret of all connections.
        reads: the reads of the node, encoded.
    """

    node: int
    peers: dict[int, list[_Peer]]
    token: bytes
    reads: bytes


@prepare_decoding
class _Connected(msgspec.Struct, array_like=True):
    """The third message of a rank.

    Attributes:
        network: the rate at which this rank receives from other nodes, in bytes per second.
        failure: why this rank cannot connect to another node; None if it can.
    """

    network: float = 0.0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SharedWithNodes:
    """The reads that this node shares with other nodes, and this rank's connections to them."""

    reads: ReadsOfNode
    links: Links


def agree_on_reading_once(
    group: Group,
    node_ranks: NodeRanks,
    wanted: Sequence[Ranges] | None,
    largest_read: Int,
    measure_store: Callable[[Ranges], float],
    cleanup: ExitStack,
    *,
    read_once: bool | None,
) -> SharedWithNodes | None:
    """Agree on the reads that nodes share. All ranks call this function together.

    Args:
        group: all ranks of the load, of several nodes.
        node_ranks: the ranks of this node.
        wanted: the byte ranges that each rank of this node wants; None if this node reads alone.
        largest_read: the greatest length of a read in bytes, one number for each file.
        measure_store: returns how many bytes per second this rank reads, given its reads.
        cleanup: closes the connections.
        read_once: whether to share reads; None: if a short measurement shows that this is faster.

    Returns:
        The reads and connections; None if every node reads alone.

    Raises:
        RankError: a rank failed; with `read_once`, also if a rank cannot connect to another.
        LostRankError: a rank died, or did not answer in time.
    """
    lead = _Lead(largest_read, read_once)
    united = unite_ranges(wanted) if wanted is not None and node_ranks.index == 0 else None
    encoded = b"" if united is None else _encode_ranges(united)

    def offer() -> tuple[socket.socket, bytes]:
        host, listener = _listen(cleanup)
        made = _Offer(node_ranks.ranks[0], host, listener.getsockname()[1], wanted is not None)
        if united is not None:
            made.digest = hashlib.blake2b(encoded, digest_size=DIGEST_SIZE).digest()
            made.nbytes, made.list_size = united.nbytes, len(encoded)
        return listener, msgspec.msgpack.encode(made)

    listener, reply = exchange_with_local_value(group, "planning shared reads", offer, lead.choose)
    senders = msgspec.msgpack.decode(reply, type=list[int])
    if not senders:
        return None
    asked = encoded if group.rank in senders else b""
    plan = exchange(group, "dividing shared reads", lambda: asked, lead.divide)
    if not plan:
        return None

    def connect_nodes() -> tuple[SharedWithNodes, bytes]:
        shared, connected = _connect(group, node_ranks, plan, listener, cleanup)
        if connected.failure is not None and read_once:
            raise LostRankError(OPERATION, {group.rank: connected.failure})
        return shared, msgspec.msgpack.encode(connected)

    shared, reply = exchange_with_local_value(group, "connecting", connect_nodes, lead.check)
    if reply and read_once is None:
        measure = partial(_encode_rate, measure_store, shared.reads.read_by(node_ranks.index))
        reply = exchange(group, "measuring the storage", measure, lead.decide)
    return shared if reply else None


def _listen(cleanup: ExitStack) -> tuple[str, socket.socket]:
    """Listen on the address that other nodes can reach; on loopback if none is known."""
    host = own_address()
    if host is None:
        with suppress(OSError):
            host = socket.gethostbyname(socket.gethostname())
    with suppress(OSError):
        if host is not None:
            return host, listen(host, cleanup)
    return LOOPBACK, listen(LOOPBACK, cleanup)


def _connect(
    group: Group,
    node_ranks: NodeRanks,
    received: bytes,
    listener: socket.socket,
    cleanup: ExitStack,
) -> tuple[SharedWithNodes, _Connected]:
    """Connect this rank to its neighbours, and measure the rate at which it receives.

    Args:
        received: what rank 0 replied: on the first rank of a node, the plan.

    Raises:
        LostRankError: the first rank of this node died, or did not answer in time.
    """
    encoded = node_ranks.share_plan(received if node_ranks.index == 0 else None)
    plan = msgspec.msgpack.decode(encoded, type=_Plan)
    ranks = {node: [peer.rank for peer in peers] for node, peers in plan.peers.items()}
    addresses = {p.rank: (p.host, p.port) for peers in plan.peers.values() for p in peers}
    reads = reads_of_node(_decode_reads(plan.reads), plan.node, ranks)
    is_own = reads.reader == node_ranks.index
    sources = set(reads.source[is_own].tolist()) - {NOBODY}
    targets = sorted(set(reads.target[is_own].tolist()) - {NOBODY})
    chosen = {target: addresses[target] for target in targets}
    # Half of the group's timeout, because a rank that could not connect waits for this rank.
    timeout = min(CONNECT_SECONDS, group.timeout.total_seconds() / 2)
    outgoing: Connections = {}
    incoming: Connections = {}
    connected = _Connected()
    try:
        outgoing, incoming = connect(
            group.rank, chosen, sources, listener, plan.token, timeout, cleanup
        )
        connected.network = measure_network(outgoing.values(), incoming.values())
    except LostRankError as error:
        connected.failure = f"{error}; open the ports between nodes, or pass read_once=False"
    except OSError as error:
        connected.failure = f"a connection broke when it was measured: {error}"
    limit, doorbell = group.timeout.total_seconds(), node_ranks.link_doorbell
    links = Links(group.rank, outgoing, incoming, doorbell, limit, node_ranks.check_alive)
    return SharedWithNodes(reads, links), connected


class _Lead:
    """Computes the replies of rank 0. Other ranks create this object, but never call it.

    Args:
        largest_read: the greatest length of a read of each file, in bytes.
        read_once: the choice of the user.
    """

    def __init__(self, largest_read: Int, read_once: bool | None) -> None:
        self._largest_read = largest_read
        self._read_once = read_once
        self._offers: list[_Offer] = []
        self._ranks: list[list[int]] = []  # of each node
        self._lists: list[bytes] = []  # the digests of all different lists of byte ranges
        self._senders: list[int] = []  # the rank that sends each list
        self._reads: ReadsBetweenNodes | None = None
        self._networks: list[float] = []  # the rate of each rank

    def choose(self, _: object, messages: list[bytes]) -> bytes:
        """Return the ranks that have to send their byte ranges; none if nothing is shared."""
        self._offers = [msgspec.msgpack.decode(each, type=_Offer) for each in messages]
        ranks_of: dict[int, list[int]] = {}
        for rank, offer in enumerate(self._offers):
            ranks_of.setdefault(offer.first, []).append(rank)
        self._ranks = list(ranks_of.values())
        if not all(offer.may_share for offer in self._offers):
            return msgspec.msgpack.encode([])
        offers = self._offers_of_nodes()
        senders: dict[bytes, int] = {}
        for offer in offers:
            senders.setdefault(offer.digest, offer.first)
        self._lists, self._senders = list(senders), list(senders.values())
        size = sum(self._offers[rank].list_size for rank in self._senders)
        if size > LARGEST_LISTS:
            log.warning("every node reads alone: lists of what nodes want have %d bytes", size)
            return msgspec.msgpack.encode([])
        wanted = [offer.nbytes for offer in offers]
        most_saved = sum(wanted) - max(wanted)
        is_worth = most_saved >= (1 if self._read_once else WORTH_MEASURING)
        return msgspec.msgpack.encode(self._senders if is_worth else [])

    def divide(self, messages: list[bytes]) -> bytes | list[bytes]:
        """Return the reply to each rank: to the first rank of a node, the plan of the node.

        All replies are empty if sharing spares few bytes.
        """
        offers = self._offers_of_nodes()
        self._reads = reads = share_between_nodes(
            [_decode_ranges(messages[rank]) for rank in self._senders],
            [self._lists.index(offer.digest) for offer in offers],
            [len(ranks) for ranks in self._ranks],
            largest_read=self._largest_read,
        )
        if reads.bytes_saved < WORTH_SHARING * sum(offer.nbytes for offer in offers):
            return b""
        token = secrets.token_bytes(TOKEN_SIZE)
        replies = [SEE_FIRST_RANK] * len(self._offers)
        encoded: dict[bytes, bytes] = {}
        for node, offer in enumerate(offers):
            if offer.digest not in encoded:
                encoded[offer.digest] = _encode_reads(reads.restrict_to_node(node))
            near = {node, *reads.neighbours(node)}
            plan = _Plan(node, {n: self._peers(n) for n in near}, token, encoded[offer.digest])
            replies[offer.first] = msgspec.msgpack.encode(plan)
        return replies

    def check(self, _: object, messages: list[bytes]) -> bytes:
        """Return nothing, so that every node reads alone, if a rank cannot connect to another."""
        connected = [msgspec.msgpack.decode(each, type=_Connected) for each in messages]
        self._networks = [each.network for each in connected]
        failures = [each.failure for each in connected if each.failure is not None]
        if failures:
            log.warning("every node reads alone, because %s", failures[0])
        return b"" if failures else YES

    def decide(self, messages: list[bytes]) -> bytes:
        """Return `YES` if the load is faster when the nodes share their reads, else empty bytes."""
        stores = [msgspec.msgpack.decode(each, type=float) for each in messages]
        found = []
        for node, (ranks, offer) in enumerate(
            zip(self._ranks, self._offers_of_nodes(), strict=True)
        ):
            received = 0 if self._reads is None else self._reads.bytes_received(node)
            store = sum(stores[rank] for rank in ranks)
            network = sum(self._networks[rank] for rank in ranks)
            found.append(NodeRates(store, network, offer.nbytes, offer.nbytes - received, received))
        return YES if is_sharing_faster(found) else b""

    def _offers_of_nodes(self) -> list[_Offer]:
        """Return the offer of the first rank of each node."""
        return [self._offers[ranks[0]] for ranks in self._ranks]

    def _peers(self, node: int) -> list[_Peer]:
        return [
            _Peer(rank, self._offers[rank].host, self._offers[rank].port)
            for rank in self._ranks[node]
        ]


def _encode_rate(measure: Callable[[Ranges], float], reads: Ranges) -> bytes:
    return msgspec.msgpack.encode(measure(reads))


def _encode_ranges(ranges: Ranges) -> bytes:
    return zlib.compress(np.stack([ranges.file, ranges.low, ranges.high]).tobytes(), 1)


def _decode_ranges(data: bytes) -> Ranges:
    return Ranges(*np.frombuffer(zlib.decompress(data), np.int64).reshape(3, -1))


def _encode_reads(reads: ReadsBetweenNodes) -> bytes:
    ranges = reads.ranges
    columns = (ranges.file, ranges.low, ranges.high, reads.node, reads.lane, reads.group)
    return zlib.compress(msgspec.msgpack.encode((np.stack(columns).tobytes(), reads.groups)), 1)


def _decode_reads(data: bytes) -> ReadsBetweenNodes:
    encoded, groups = msgspec.msgpack.decode(
        zlib.decompress(data), type=tuple[bytes, tuple[tuple[int, ...], ...]]
    )
    file, low, high, node, lane, group = np.frombuffer(encoded, np.int64).reshape(6, -1)
    return ReadsBetweenNodes(Ranges(file, low, high), node, lane, group, groups)
