"""The records that trainers and agents leave beside the files of a snapshot, and their names.

Each is written once, whole, by one process; what an agent has to do next follows from the records
that are there. So an agent that is killed needs nobody to tell its successor anything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable
from functools import cache
from typing import Annotated

import msgspec

from shardwise.errors import FormatError
from shardwise.manifest.manifest import FileEntry
from shardwise.memory.redundancy.placement import Group, Protection
from shardwise.retention import PlainKeep

PlainName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]
DATA = (".safetensors", ".bin")
"""How the names of files end that are no records."""
RETAIN = "retain"
"""What comes after the last stage, and only the end of a run waits for: old checkpoints go."""
STAGES = ("commit", "protect", "persist", RETAIN)
"""The stages whose outcome is recorded for the cluster."""
STAGED = ".staged.json"
_COPYING = ".copying"
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.json")


class AgentInfo(msgspec.Struct, frozen=True):
    """How to talk to the agent of a node; whoever has it may.

    Attributes:
        schema: what `schema()` is in its version of shardwise.
    """

    node: str
    url: str
    token: str
    process: int = 0
    domain: str = ""
    host: str = ""
    schema: str = ""

    def __repr__(self) -> str:
        return f"AgentInfo(node={self.node!r}, url={self.url!r})"


class Staged(msgspec.Struct, frozen=True):
    """A rank's file lies in memory, but for its checksums.

    The record is written before the file is moved to its place: it counts once the file is there.

    Attributes:
        file: its entry in the manifest, but for its checksums.
        slot: the name of its memory when it is free.
        slots: how many committed snapshots are to be kept.
        stages: what is to become of the snapshot.
        epoch: of the run, when it was saved.
    """

    file: FileEntry
    slot: str
    slots: int
    stages: tuple[str, ...]
    epoch: int | None = None


class Kept(msgspec.Struct, frozen=True):
    """A rank has made, from its own replicas, what its node keeps for others, as far as it can.

    The record is written before the file is moved to its place.

    Attributes:
        ring: those who protect each other, with their files.
        file: its name beside this record.
        slot: the name of its memory when it is free.
        block: the number of the block of parity that it is; None if it is a copy.
        of: the bytes of each data file that went into it, in whole blocks of checksums.
        sums: for parity, the checksums of these blocks as they were here, 4 bytes each.
    """

    ring: Group
    file: str
    slot: str
    block: int | None
    of: dict[str, tuple[int, int]]
    sums: dict[str, bytes] = {}


class PendingManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the node of rank 0 knows of a snapshot, whose agent leads it to its end.

    Attributes:
        manifest: the manifest, its files left out; text.
        files: the names of the files, in the manifest's order, and the node of each.
        nodes: of all nodes of the run.
        epoch: of the run, when it was saved.
        root: where it belongs in storage.
        durable: whether it is to be persisted in any case.
        rescue: whether it is to be persisted if a trainer is lost.
        keep: rules of retention in storage.
        damaged: steps in storage that are known to be damaged, and do not count as kept.
        copies, parity, group: how to protect it.
        rings: names of files whose ranks hold the same, and protect each other without the network.
        wait: seconds to wait for a node that does not answer.
        budget: bytes a second that each node may copy.
        bytes_held, bytes_total: tensor bytes on all ranks, and of the snapshot.
    """

    save_id: str
    step: int
    manifest: str
    files: list[tuple[str, str]]
    nodes: list[AgentInfo]
    leader: str
    root: str
    epoch: int = 0
    durable: bool = False
    rescue: bool = False
    overwrite: bool = False
    keep: PlainKeep = {}
    damaged: list[int] = []
    copies: int = 0
    parity: int = 0
    group: int = 8
    rings: list[list[str]] = []
    wait: float = 60.0
    budget: int | None = None
    bytes_held: int = 0
    bytes_total: int = 0


class Persist(msgspec.Struct, frozen=True, kw_only=True):
    """Copy these files of this node to a place."""

    save_id: str
    place: str
    files: list[PlainName]
    wait: float
    budget: int | None = None


class Protect(msgspec.Struct, frozen=True, kw_only=True):
    """Keep for other nodes what this says.

    Attributes:
        rings: so many groups, the first ones, are rings.
    """

    save_id: str
    protection: Protection
    nodes: list[AgentInfo]
    wait: float
    rings: int = 0


class Retain(msgspec.Struct, frozen=True, kw_only=True):
    """Remove from storage what is no longer kept there.

    Attributes:
        step: the one that was published; newer ones are left alone.
        root: where checkpoints are.
        keep: rules of retention.
        damaged: steps there that are known to be damaged: they do not count, and stay.
    """

    save_id: str
    step: int
    root: str
    keep: PlainKeep
    damaged: list[int] = []


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A stage has ended: well, or with what went wrong, and where."""

    save_id: str
    stage: str
    seconds: float = 0.0
    bytes: int = 0
    failure: str = ""
    node: str = ""
    bytes_held: int = 0
    bytes_total: int = 0
    files: int = 0


@cache
def schema() -> str:
    """Equal for versions of shardwise that read each other's records: a digest of their fields."""
    kinds = [each for each in globals().values() if isinstance(each, type)]
    structs = [each for each in kinds if issubclass(each, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    encoded = msgspec.json.encode(components, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def save_of(data_file: str) -> str:
    """The id of the save that a data file, or a record of it, is of."""
    return data_file.split("-")[1].split(".")[0]


def rank_of(name: str) -> int:
    """The rank that a slot, or a record of a data file, is of."""
    return int(name[1:].split("-")[0])


def staged(data_file: str) -> str:
    """The name of the record that a data file is staged."""
    return data_file.removesuffix(".safetensors") + STAGED


def failed(data_file: str) -> str:
    """The name of the record that a data file will never be staged: `Done`, with the reason."""
    return f"{data_file.removesuffix('.safetensors')}.failed.json"


def copying(data_file: str) -> str:
    """The name of the mark that a rank copies its data file into memory now."""
    return data_file.removesuffix(".safetensors") + _COPYING


def being_copied(names: Iterable[str]) -> list[str]:
    """The marks that ranks of this node copy data files now."""
    return [name for name in names if name.endswith(_COPYING)]


def kept(data_file: str, number: int) -> str:
    """The name of the record that the rank of a data file has made what it keeps for others."""
    return f"{data_file.removesuffix('.safetensors')}.kept-{number}.json"


def kept_file(record: str) -> str:
    """The name of the file that a rank has made for others, until the agent claims it."""
    return f"{record.removesuffix('.json')}.bin"


def entry(data_file: str) -> str:
    """The name of the record that a data file has its checksums: its entry in the manifest."""
    return f"{data_file}.entry.json"


def pending(save_id: str) -> str:
    """Return the name of the pending manifest of a save, on the node that leads the save."""
    return f"pending-{save_id}.json"


def pending_copy(save_id: str) -> str:
    """Return the name of the followers' copy of the pending manifest of a save."""
    return f"pending-copy-{save_id}.json"


def request(stage: str, save_id: str) -> str:
    """The name of the record by which a leader asks a node for a stage."""
    return f"{stage}-{save_id}.json"


def requested(stage: str, names: Iterable[str]) -> list[str]:
    """The saves for which a leader has asked for a stage, by the names of the records."""
    before, after = f"{stage}-", ".json"
    named = [name for name in names if name.startswith(before) and name.endswith(after)]
    found = (name.removeprefix(before).removesuffix(after) for name in named)
    return sorted(save_id for save_id in found if _SAVE_ID.fullmatch(save_id))


def unended(stage: str, of: str, names: Collection[str]) -> list[str]:
    """The saves that have a record `of` something, and for which a stage has not ended."""
    return [each for each in requested(of, names) if outcome(stage, each) not in names]


def unsealed(names: Collection[str]) -> list[str]:
    """The data files that are staged, and have no checksums."""
    files = [f"{name.removesuffix(STAGED)}.safetensors" for name in names if name.endswith(STAGED)]
    return sorted(file for file in files if file in names and entry(file) not in names)


def done(stage: str, save_id: str) -> str:
    """The name of the record that a stage has ended on this node."""
    return f"{stage}-done-{save_id}.json"


def outcome(stage: str, save_id: str) -> str:
    """The name of the record that a stage has ended for the cluster."""
    return f"{stage}-all-{save_id}.json"


def names_slot(name: str) -> bool:
    """Whether this is the name of a record that says what a file's memory is called when free."""
    return name.endswith(STAGED) or is_kept(name)


def is_kept(name: str) -> bool:
    """Whether this is the name of a record that a rank has made what it keeps for others."""
    return ".kept-" in name and name.endswith(".json")


def is_outcome(name: str) -> bool:
    """Whether this is the name of a record that a stage has ended for the cluster."""
    return "-all-" in name and name.endswith(".json")


def checked_record(name: str) -> str:
    """The name of a record, if it is one plain component.

    Raises:
        FormatError: it is not.
    """
    if not _RECORD.fullmatch(name):
        raise FormatError(f"{name!r} is no name of a record")
    return name
