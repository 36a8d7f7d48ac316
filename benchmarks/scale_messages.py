"""The messages of a save by more ranks than there can be processes.

One rank of each kind runs the real code, as far as to its message. The messages of the other ranks
are copies of it, with their own rank and coordinates. Then the messages are combined along the tree
of ranks, by the real code. What a few watched ranks receive is recorded. Each watched rank is then
measured in a process of its own, which replays what it received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.scale_states import Job
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.describe import BoundState
from shardwise.kernel.engine.group import Combine, Decode, Group
from shardwise.kernel.engine.planning import (
    PlannedSave,
    SaveRequest,
    _Offer,
    plan_together,
)
from shardwise.kernel.engine.rounds import Round, Values, _Message, values_of
from shardwise.kernel.engine.save import _Files, _table_of, _unite_files
from shardwise.kernel.engine.shared_structures import _Described
from shardwise.kernel.events import Recorder
from shardwise.kernel.manifest.checksums import block_count
from shardwise.kernel.manifest.manifest import lay_out_file
from shardwise.kernel.plan.save import PlanCache, SavePlan
from shardwise.kernel.store.places import open_store
from shardwise.parts.ranks.tree import children_of

T = TypeVar("T")
SAVE_ID = "0123456789abcdef"
DESCRIPTIONS = 1
"""The round in which ranks send different messages: their structures."""


class UnknownMessages(BaseException):
    """A rank has its message, but those of other ranks are not known.

    Args:
        data: the message.
        combine: how to combine it with others.
    """

    def __init__(self, data: bytes, combine: Combine) -> None:
        super().__init__()
        self.data, self.combine = data, combine


class ReplayGroup:
    """A rank of a group, for which all that it receives was recorded; implements `Group`.

    Args:
        rank, size: the rank, and the number of ranks.
        below: for each round, the messages of the ranks below.
        replies: for each round, what rank 0 sends to all ranks. Rank 0 adds to them.
    """

    timeout = timedelta(minutes=10)

    def __init__(
        self, rank: int, size: int, below: Sequence[Sequence[bytes]], replies: list[bytes]
    ) -> None:
        self.rank = self.number = rank
        self.size = size
        self.bytes_sent = self.bytes_received = 0
        self.rounds = 0
        self._below, self._replies = below, replies
        self._fan_out = len(children_of(rank, size))

    def rewind(self, rounds: int) -> None:
        """Go back to the first round of an operation."""
        self.rounds = rounds

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> Group:
        """Refuse: in these jobs, all ranks save together."""
        raise NotImplementedError(f"{len(ranks)} ranks without the others")

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Combine the rank's data with those of the ranks below."""
        is_known = self.rounds < (len(self._replies) if self.rank else len(self._below))
        if not is_known:
            raise UnknownMessages(data, combine)
        if self._below:
            received = self._below[self.rounds]
            self.bytes_received += sum(map(len, received))
            data = combine([data, *received])
        if self.rank:
            self.bytes_sent += len(data)
            return b""
        return data

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """Return the reply of rank 0, and pass it on."""
        if self.rank == 0:
            self._replies[self.rounds :] = [data]
        else:
            data = self._replies[self.rounds]
            self.bytes_received += len(data)
        self.rounds += 1
        self.bytes_sent += len(data) * self._fan_out
        decode(data)
        return data


@dataclass
class SavingRank:
    """One rank of a job that saves.

    Attributes:
        request: what it saves.
        plan_cache: its plans.
    """

    request: SaveRequest
    plan_cache: PlanCache = field(default_factory=PlanCache)

    @classmethod
    def of(cls, job: Job, rank: int, directory: Path) -> SavingRank:
        """Return a rank of a job. Nothing is written to the directory."""
        store = open_store(directory / "checkpoint")
        request = SaveRequest(
            state=BoundState(job.state(rank)),
            store=store,
            arena=Arena(1 << 20),
            step=1000,
            needs_room=False,
            save_id=SAVE_ID,
        )
        return cls(request)

    def plan(self, group: ReplayGroup) -> PlannedSave:
        """Plan the save with the other ranks."""
        return plan_together(lambda: self.request, None, group, self.plan_cache, Recorder())

    def publish(self, group: ReplayGroup, planned: PlannedSave) -> bytes:
        """Tell the other ranks of this rank's file. Return the manifest, on rank 0."""
        manifests = []

        def publish(files: _Files) -> None:
            table = _table_of(files, planned.save_id)
            manifests.append((planned.manifest(table), table.names)[0])

        source = planned.source()
        with Round(group, "writing a save") as all_ranks:
            entry = {} if source is None else encode_file(source.entry, group.rank)
            all_ranks.all_reduce(entry, _Files, _unite_files, publish, type(None))
        return manifests[0] if manifests else b""


def encode_file(entry: object, rank: int, checksum: int = 0x9ABCDEF0) -> _Files:
    """Return the message about a file, with a checksum that no other rank has."""
    sizes = np.array(
        [getattr(entry, key) for key in ("size", "data_at", "objects_at", "checksums_at")], "<i8"
    )
    return {sizes.tobytes(): np.array([rank, (checksum * (rank + 1)) % 2**32], "<u4").tobytes()}


Change = Callable[[_Message, int], bytes]
"""Makes the data of a rank from the message of a similar rank."""


@dataclass
class Recording:
    """Records what some ranks receive.

    Args:
        job: the job.
        watched: the ranks.
        directory: for files.
    """

    job: Job
    watched: Sequence[int]
    directory: Path
    replies: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.received: dict[int, list[list[bytes]]] = {rank: [] for rank in {0, *self.watched}}

    def record(self) -> dict[int, tuple[list[list[bytes]], list[bytes]]]:
        """Return what each watched rank receives in a first and in a cached save."""
        first = SavingRank.of(self.job, 0, self.directory)
        root = ReplayGroup(0, self.job.world, self.received[0], self.replies)
        self._complete(first, root, partial(first.plan, root))
        planned = self._complete(first, root, partial(first.plan, root))
        self._complete(first, root, partial(first.publish, root, planned), planned)
        return {
            rank: (self.received[rank] if children_of(rank, self.job.world) else [], self.replies)
            for rank in self.watched
        }

    def _complete(
        self,
        first: SavingRank,
        root: ReplayGroup,
        work: Callable[[], T],
        published: PlannedSave | None = None,
    ) -> T:
        """Repeat a part of rank 0's save until the messages of all its rounds are known."""
        begin, cached = root.rounds, dict(first.plan_cache._plans)
        while True:
            first.plan_cache._plans.clear()
            first.plan_cache._plans.update(cached)
            root.rewind(begin)
            try:
                return work()
            except UnknownMessages as unknown:
                self._combine(unknown, published)

    def _combine(self, unknown: UnknownMessages, published: PlannedSave | None) -> None:
        """Combine the messages of all ranks in one round."""
        prototypes: dict[int, _Message] = {}
        change = self._change_of(unknown, published)

        def message_of(rank: int) -> bytes:
            kind = self.job.like(rank)
            if kind not in prototypes:
                data = self._message_of_kind(kind, unknown)
                prototypes[kind] = msgspec.msgpack.decode(data, type=_Message)
            message = prototypes[kind]
            return msgspec.msgpack.encode(
                _Message(dict.fromkeys(message.operations, rank), change(message, rank))
            )

        def up(rank: int) -> bytes:
            below = [up(each) for each in children_of(rank, self.job.world)]
            if rank in self.received:
                self.received[rank].append(below)
            if rank == 0:
                return b""  # combined in the next attempt of rank 0
            return unknown.combine([message_of(rank), *below]) if below else message_of(rank)

        up(0)

    def _message_of_kind(self, kind: int, unknown: UnknownMessages) -> bytes:
        """Return the message of one rank: its own if it describes the rank, else that of rank 0."""
        if kind == 0 or len(self.replies) != DESCRIPTIONS:
            return unknown.data
        rank = SavingRank.of(self.job, kind, self.directory)
        try:
            rank.plan(ReplayGroup(kind, self.job.world, [], self.replies))
        except UnknownMessages as reached:
            return reached.data
        raise RuntimeError("a rank planned alone")

    def _change_of(self, unknown: UnknownMessages, published: PlannedSave | None) -> Change:
        message = msgspec.msgpack.decode(unknown.data, type=_Message)
        (operation,) = message.operations
        if not message.data:
            return lambda message, rank: b""
        if published is not None:
            return files_of(published)
        changes = {
            "agreeing on a save": change_offer,
            "describing a save": self._change_members,
            "planning a save": change_values,
        }
        return changes[operation]

    def _change_members(self, message: _Message, rank: int) -> bytes:
        decoded = msgspec.msgpack.decode(message.data, type=_Described)
        (members,) = decoded.members.values()
        members.ranks = np.array([rank], "<i4").tobytes()
        members.coordinates = np.array(self.job.coordinates(rank), "<i4").tobytes()
        return msgspec.msgpack.encode(decoded)


def change_offer(message: _Message, rank: int) -> bytes:
    """Return the offer of another rank."""
    offer = msgspec.msgpack.decode(message.data, type=_Offer)
    ((settings, _),) = offer.settings[""].items()
    offer.settings = values_of(rank, {"": settings})
    offer.save_id = ""
    return msgspec.msgpack.encode(offer)


def change_values(message: _Message, rank: int) -> bytes:
    """Return the values of another rank, which are the same."""
    values = msgspec.msgpack.decode(message.data, type=Values)
    own = {name: next(iter(by_value)) for name, by_value in values.items()}
    return msgspec.msgpack.encode(values_of(rank, own))


def files_of(planned: PlannedSave) -> Change:
    """Return a function that describes the files of all ranks."""
    nbytes, plan = data_bytes(planned.plan), planned.plan
    writes = np.zeros(plan.world, bool)
    writes[plan.writers] = True
    objects = (
        len(msgspec.json.encode(per_rank))
        if (per_rank := planned.request.state.values.per_rank)
        else 0
    )
    header = lay_out_file(planned.save_id, 0, plan.header_entries, objects)[1].data_at

    @dataclass
    class Entry:
        size: int
        data_at: int
        objects_at: int
        checksums_at: int

    def change(message: _Message, rank: int) -> bytes:
        end = header + int(nbytes[rank])
        stop = end + objects
        entry = Entry(stop + 4 * block_count(stop), header, end, stop)
        return msgspec.msgpack.encode(encode_file(entry, rank) if writes[rank] else {})

    return change


def data_bytes(plan: SavePlan) -> np.ndarray:
    """Return the bytes of tensors in the file of each rank."""
    sizes = np.zeros(plan.world, np.int64)
    for group in plan.groups:
        sizes[group.ranks] += group.nbytes * len(group.tensors)
    return sizes


def messages_file(directory: Path, rank: int) -> Path:
    """Return the file of what a rank receives."""
    return directory / f"rank-{rank}"


def save_messages(job: Job, watched: Sequence[int], directory: Path) -> None:
    """Record what some ranks receive, in files."""
    for rank, received in Recording(job, watched, directory).record().items():
        messages_file(directory, rank).write_bytes(msgspec.msgpack.encode(received))


def load_group(job: Job, rank: int, directory: Path) -> ReplayGroup:
    """Return a rank that replays what was recorded."""
    kind = tuple[list[list[bytes]], list[bytes]]
    below, replies = msgspec.msgpack.decode(messages_file(directory, rank).read_bytes(), type=kind)
    return ReplayGroup(rank, job.world, below, replies)


def watched_ranks(job: Job) -> Iterator[tuple[str, int]]:
    """Yield the ranks to measure: the root, the first rank below it, and a leaf."""
    yield "root", 0
    yield "aggregator", 1
    yield "leaf", job.world - 1
