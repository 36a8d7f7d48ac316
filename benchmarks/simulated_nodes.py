"""Nodes of a run that one process simulates: each answers on a port of its own, at once.

A simulated node has sealed its files, and replies at once to a call for its part of a stage, for
itself and the nodes below it in the tree. The nodes that the leader calls ask it for the pending
manifest, the manifest and the outcomes. The process counts the requests and the bytes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from shardwise.kernel.manifest.manifest import MANIFEST, FileEntry, data_file, lay_out_file
from shardwise.parts.memory import records
from shardwise.parts.memory.files import encode_record
from shardwise.parts.memory.node_tree import NodeTree
from shardwise.parts.memory.records import MOST_FAN_OUT, AgentInfo, SubtreeReply
from shardwise.parts.memory.replies import Replies
from shardwise.parts.memory.seal import seal

SAVE = "a" * 16
RANKS = 8
TOKEN = "t" * 64


def name_of_node(index: int) -> str:
    """Return the name of a node by its index in the run."""
    return f"host-{index:05d}-0a1b2c3d"


def ranks_of(index: int) -> range:
    """Return the ranks of a node, whose files have the same indices."""
    return range(index * RANKS, (index + 1) * RANKS)


@cache
def nodes_below(index: int, nodes: int) -> list[int]:
    """Return the indices of a node and of the nodes below it in the tree."""
    children = NodeTree(range(nodes), MOST_FAN_OUT).children(index)  # type: ignore[arg-type]
    return sorted([index, *(each for child in children for each in nodes_below(child, nodes))])


@cache
def make_file(rank: int) -> tuple[bytes, FileEntry]:
    """Return the bytes and the entry of a rank's file, which has no tensors."""
    header, entry = lay_out_file(SAVE, rank, (b"{}", 0))
    data = np.zeros(entry.size, np.uint8)
    data[: len(header)] = np.frombuffer(header, np.uint8)
    sealed = seal(data, entry, processes=1)
    return data.tobytes(), sealed


@dataclass
class Counts:
    """What the simulated nodes have received and sent."""

    requests: dict[str, int] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    received: int = 0
    sent: int = 0


class _Peer(asyncio.Protocol):
    """A connection to a simulated node."""

    def __init__(self, index: int, nodes: int, counts: Counts) -> None:
        self._index, self._nodes, self._counts = index, nodes, counts
        self._data = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._data += data
        self._counts.received += len(data)
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head, *lines = self._data[:end].decode().split("\r\n")
            headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
            length = int(headers.get("content-length", "0"))
            if len(self._data) < end + 4 + length:
                return
            del self._data[: end + 4 + length]
            method, path, _ = head.split(" ")
            name = path.partition("?")[0].split("/")[-1]
            kind = f"{method} {'file' if name[:2] in ('r0', 'r1') else name}"
            self._counts.requests[kind] = self._counts.requests.get(kind, 0) + 1
            self._counts.nodes.add(self._index)
            self._answer(method, name, headers.get("range"))

    def _answer(self, method: str, name: str, byte_range: str | None) -> None:
        if method == "POST":
            self._send("200 OK", encode_record(self._reply(name)))
            return
        body = self._find(name)
        if body is None:
            self._send("404 Not Found", b"")
        elif byte_range is None:
            self._send("200 OK", body)
        else:
            low, high = map(int, byte_range.removeprefix("bytes=").split("-"))
            header = f"Content-Range: bytes {low}-{high}/{len(body)}\r\n"
            self._send("206 Partial Content", body[low : high + 1], header)

    def _find(self, name: str) -> bytes | None:
        for rank in ranks_of(self._index):
            if name == data_file(rank, SAVE):
                return make_file(rank)[0]
        return None

    def _reply(self, stage: str) -> SubtreeReply:
        below = nodes_below(self._index, self._nodes)
        entries_of = {
            node: {rank: make_file(rank)[1] for rank in ranks_of(node) if stage == "commit"}
            for node in below
        }
        replies = [Replies.of_node(node, 1, entries_of[node]) for node in below]
        combined = Replies(
            nodes=np.concatenate([each.nodes for each in replies]),
            nbytes=np.concatenate([each.nbytes for each in replies]),
            files=np.concatenate([each.files for each in replies]),
            entries=np.concatenate([each.entries for each in replies]),
        )
        return combined.encode(SAVE)

    def _send(self, status: str, body: bytes, headers: str = "") -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
        self._transport.write(head.encode() + body)
        self._counts.sent += len(head) + len(body)


@contextmanager
def simulate(
    nodes: int, stored: Path, leader: int, run: str, snapshot: str
) -> Iterator[tuple[list[AgentInfo], Connection]]:
    """Simulate all nodes but the first while the block runs.

    Args:
        stored: the directory of the save in storage.
        leader: the port of the agent of the first node.
        run, snapshot: the id of the run, and the name of the snapshot's directory.

    Yields:
        The agents of these nodes; and a connection: whoever sends anything over it gets the
        `Counts` since the last time.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(
        target=_serve, args=(nodes, theirs, stored, leader, f"/runs/{run}", snapshot), daemon=True
    )
    process.start()
    try:
        ports = ours.recv()
        infos = [
            AgentInfo(
                name_of_node(index),
                f"http://127.0.0.1:{port}",
                TOKEN,
                process=1000,
                host=name_of_node(index),
                schema=records.schema(),
            )
            for index, port in enumerate(ports, 1)
        ]
        yield infos, ours
    finally:
        process.kill()
        process.join()


def _serve(
    nodes: int, connection: Connection, stored: Path, leader: int, run: str, snapshot: str
) -> None:
    for rank in range(nodes * RANKS):
        make_file(rank)
        (stored / data_file(rank, SAVE)).touch()  # as if all nodes had copied their files
    asyncio.run(_serve_all(nodes, connection, leader, run, snapshot))


async def _serve_all(
    nodes: int, connection: Connection, leader: int, run: str, snapshot: str
) -> None:
    loop = asyncio.get_running_loop()
    counts = Counts()
    ports = []
    for index in range(1, nodes):
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        ports.append(listener.getsockname()[1])
        await loop.create_server(partial(_Peer, index, nodes, counts), sock=listener)

    def report() -> None:
        connection.recv()
        connection.send(
            Counts(dict(counts.requests), set(counts.nodes), counts.received, counts.sent)
        )
        counts.requests.clear()
        counts.nodes.clear()
        counts.received = counts.sent = 0

    loop.add_reader(connection.fileno(), report)
    connection.send(ports)
    children = NodeTree(range(nodes), MOST_FAN_OUT).children(0)  # type: ignore[arg-type]
    follow = [_follow(leader, run, f"{run}/{snapshot}", counts) for _ in children]
    await asyncio.gather(*follow, asyncio.Event().wait())


async def _follow(port: int, run: str, snapshot: str, counts: Counts) -> None:
    """Ask the leader as the agent of a node below it does, until all stages have ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def get(path: str) -> tuple[int, bytes]:
        head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
        writer.write(head.encode())
        counts.sent += len(head)
        name = path.partition("?")[0].rpartition("/")[2]
        kind = f"to the leader: GET {name}"
        counts.requests[kind] = counts.requests.get(kind, 0) + 1
        found = await reader.readuntil(b"\r\n\r\n")
        lines = found.decode().lower().split("\r\n")
        size = next(int(each.split(":")[1]) for each in lines if each.startswith("content-length"))
        body = await reader.readexactly(size)
        counts.received += len(found) + size
        return int(lines[0].split(" ")[1]), body

    version, has_pending, has_manifest, ended = 0, False, False, set[str]()
    while len(ended) < len(records.STAGES):
        _, body = await get(f"{run}/outcomes?version={version}&wait=5")
        told = msgspec.json.decode(body, type=records.Outcomes)
        version, ended = told.version, set(told.saves.get(SAVE, {}))
        if not has_pending:
            has_pending = (await get(f"{snapshot}/{records.PENDING}"))[0] == 200
        if not has_manifest and "commit" in ended:
            has_manifest = (await get(f"{snapshot}/{MANIFEST}"))[0] == 200
    writer.close()


if __name__ == "__main__":
    sys.exit("run benchmarks.agents_scale")
