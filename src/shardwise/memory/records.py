"""The records that trainers and agents write next to the files of a snapshot, and their names.

One process writes each record once, atomically. The records on a node determine what its agent does
next. So an agent that was killed needs no other state to be replaced.
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
"""The suffixes of files that are not records."""
RETAIN = "retain"
"""The action after the last stage: remove old checkpoints. Only closing a run waits for it."""
STAGES = ("commit", "protect", "persist", RETAIN)
"""The stages whose outcome is recorded for the cluster."""
STAGED = ".staged.json"
_COPYING = ".copying"
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_RECORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.json")


class AgentInfo(msgspec.Struct, frozen=True):
    """The address and token of a node's agent. Whoever has them can use the agent.

    Attributes:
        schema: the result of `schema()` in the agent's version of shardwise.
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
    """A rank's file is in memory, complete except for its checksums.

    The record is written before the file is moved to its place. It is valid once the file is there.

    Attributes:
        file: the file's entry in the manifest, without checksums.
        slot: the name of the free slot that the file becomes.
        slots: the number of committed snapshots to keep.
        stages: the stages that the rank requested.
        epoch: the epoch of the run at the save.
    """

    file: FileEntry
    slot: str
    slots: int
    stages: tuple[str, ...]
    epoch: int | None = None


class Kept(msgspec.Struct, frozen=True):
    """A rank has made a copy or parity for other nodes from its own replicas, as far as it could.

    The record is written before the file is moved to its place.

    Attributes:
        ring: the ranks that protect each other, with their files.
        file: the name of the file, in the same directory.
        slot: the name of the free slot that the file becomes.
        block: the number of the parity block; None for a copy.
        of: the byte range of each data file that is included, in whole blocks.
        sums: for parity, the checksums of the included blocks as this rank read them, 4 bytes each.
    """

    ring: Group
    file: str
    slot: str
    block: int | None
    of: dict[str, tuple[int, int]]
    sums: dict[str, bytes] = {}


class PendingManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a save that is not committed yet, and everything else that its leader needs.

    The leader is the agent of rank 0's node.

    Attributes:
        manifest: the manifest as text, without its files.
        files: the names of the files, in the manifest's order, and the node of each.
        nodes: the agents of all nodes of the run.
        leader: the name of the leader's node.
        root: the root to which the checkpoint is persisted.
        epoch: the epoch of the run at the save.
        durable: whether to persist the save in any case.
        rescue: whether to persist the save if a trainer is lost.
        overwrite: whether to replace a checkpoint of the same step.
        keep: the retention rules of the root.
        damaged: steps in the root that are known to be damaged, and do not count as kept.
        copies, parity, group: how to protect the save.
        rings: for each ring, the names of its ranks' files.
        wait: seconds to wait for a node that does not answer.
        budget: bytes per second that each node may copy to storage.
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
    """A request to copy files of this node to storage.

    Attributes:
        place: the directory of the checkpoint.
    """

    save_id: str
    place: str
    files: list[PlainName]
    wait: float
    budget: int | None = None


class Protect(msgspec.Struct, frozen=True, kw_only=True):
    """A request to store copies or parity for other nodes.

    Attributes:
        rings: how many of the groups, from the first, are rings.
    """

    save_id: str
    protection: Protection
    nodes: list[AgentInfo]
    wait: float
    rings: int = 0


class Retain(msgspec.Struct, frozen=True, kw_only=True):
    """A request to remove old checkpoints from storage.

    Attributes:
        step: the step that was published. Newer ones are not touched.
        root: the directory of the checkpoints.
        keep: the retention rules.
        damaged: steps that are known to be damaged: they do not count as kept, and are not removed.
    """

    save_id: str
    step: int
    root: str
    keep: PlainKeep
    damaged: list[int] = []


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A stage has ended.

    Attributes:
        failure: why it failed; "" if it succeeded.
        node: the node that failed.
    """

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
    """Return a digest of the records' fields: versions of shardwise with the same digest are
    compatible."""
    kinds = [each for each in globals().values() if isinstance(each, type)]
    structs = [each for each in kinds if issubclass(each, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    encoded = msgspec.json.encode(components, order="deterministic")
    return hashlib.blake2b(encoded, digest_size=8).hexdigest()


def save_of(data_file: str) -> str:
    """Return the save id in the name of a data file, or of a record of one."""
    return data_file.split("-")[1].split(".")[0]


def rank_of(name: str) -> int:
    """Return the rank in the name of a slot, or of a record of a data file."""
    return int(name[1:].split("-")[0])


def staged(data_file: str) -> str:
    """Return the name of the record that a data file is staged."""
    return data_file.removesuffix(".safetensors") + STAGED


def failed(data_file: str) -> str:
    """Return the name of the `Done` record that says why a data file will never be staged."""
    return f"{data_file.removesuffix('.safetensors')}.failed.json"


def copying(data_file: str) -> str:
    """Return the name of the marker that a rank is copying its data file into memory."""
    return data_file.removesuffix(".safetensors") + _COPYING


def being_copied(names: Iterable[str]) -> list[str]:
    """Return the markers of data files that ranks of this node are copying."""
    return [name for name in names if name.endswith(_COPYING)]


def kept(data_file: str, number: int) -> str:
    """Return the name of the record of what a data file's rank has made for other nodes."""
    return f"{data_file.removesuffix('.safetensors')}.kept-{number}.json"


def kept_file(record: str) -> str:
    """Return the name of the file that the rank has made, until the agent claims it."""
    return f"{record.removesuffix('.json')}.bin"


def entry(data_file: str) -> str:
    """Return the name of the record of a sealed data file: its entry in the manifest."""
    return f"{data_file}.entry.json"


def pending(save_id: str) -> str:
    """Return the name of the pending manifest of a save, on the node that leads the save."""
    return f"pending-{save_id}.json"


def pending_copy(save_id: str) -> str:
    """Return the name of the followers' copy of the pending manifest of a save."""
    return f"pending-copy-{save_id}.json"


def request(stage: str, save_id: str) -> str:
    """Return the name of the record by which a leader requests a stage from a node."""
    return f"{stage}-{save_id}.json"


def requested(stage: str, names: Iterable[str]) -> list[str]:
    """Return the saves for which `names` has a request of a stage, sorted."""
    before, after = f"{stage}-", ".json"
    named = [name for name in names if name.startswith(before) and name.endswith(after)]
    found = (name.removeprefix(before).removesuffix(after) for name in named)
    return sorted(save_id for save_id in found if _SAVE_ID.fullmatch(save_id))


def unended(stage: str, of: str, names: Collection[str]) -> list[str]:
    """Return the saves that have a request of `of`, and no outcome of `stage`."""
    return [each for each in requested(of, names) if outcome(stage, each) not in names]


def unsealed(names: Collection[str]) -> list[str]:
    """Return the data files that are staged but not sealed."""
    files = [f"{name.removesuffix(STAGED)}.safetensors" for name in names if name.endswith(STAGED)]
    return sorted(file for file in files if file in names and entry(file) not in names)


def done(stage: str, save_id: str) -> str:
    """Return the name of the record that a stage has ended on this node."""
    return f"{stage}-done-{save_id}.json"


def outcome(stage: str, save_id: str) -> str:
    """Return the name of the record that a stage has ended for the cluster."""
    return f"{stage}-all-{save_id}.json"


def names_slot(name: str) -> bool:
    """Return whether the record of this name names a slot."""
    return name.endswith(STAGED) or is_kept(name)


def is_kept(name: str) -> bool:
    """Return whether this is the name of a `Kept` record."""
    return ".kept-" in name and name.endswith(".json")


def is_outcome(name: str) -> bool:
    """Return whether this is the name of a record that a stage has ended for the cluster."""
    return "-all-" in name and name.endswith(".json")


def checked_record(name: str) -> str:
    """Return the name of a record if it is a valid, plain file name.

    Raises:
        FormatError: it is not.
    """
    if not _RECORD.fullmatch(name):
        raise FormatError(f"{name!r} is not the name of a record")
    return name
