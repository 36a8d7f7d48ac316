"""The records that trainers and agents write next to the files of a snapshot, and their names.

A record is a small JSON file. One process writes it, once and atomically. The records on a node
determine what the agent does next. So if an agent is killed, the next agent continues the work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Literal

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.manifest.manifest import MANIFEST, Count, FileEntry
from shardwise.parts.memory.files import FileName, SaveId, encode_record
from shardwise.parts.tiers.options import StorageTask

GeneratedFileName = Annotated[
    str, msgspec.Meta(pattern=r"\A[.]?[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")
]
"""The name of a file that an agent makes; it begins with a dot until the file is complete."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
MOST_FAN_OUT = 32
FanOut = Annotated[int, msgspec.Meta(ge=1, le=MOST_FAN_OUT)]
RequestedStage = Annotated[str, msgspec.Meta(pattern=r"\A(commit|protect|persist)\Z")]
AnyStage = Annotated[str, msgspec.Meta(pattern=r"\A(stage|commit|protect|persist|retain|rescue)\Z")]

DATA_SUFFIXES = (".safetensors", ".bin")
"""The suffixes of data files, copies and parity."""
REMOVE_OLD = "retain"
"""The stage that follows `persist` and removes old checkpoints. Only closing a run waits for it."""
STAGES = ("commit", "protect", "persist", REMOVE_OLD)
"""The stages whose outcome is recorded for the cluster."""
STAGED_SUFFIX, COPYING_SUFFIX = ".staged.json", ".copying.json"
TOLD_STAGES = ("commit", "protect", "persist")
"""The stages whose outcome each node of the tree tells the nodes below it."""
RecordKind = Literal["", "done", "all", "told", "retry", "copy"]
PENDING_KINDS: tuple[RecordKind, ...] = ("", "copy")
_SAVE_IN_NAME = re.compile(r"-([0-9a-f]{16})[.]")


class AgentInfo(msgspec.Struct, frozen=True):
    """The address of a node's agent, and the token that clients of the agent must present.

    Attributes:
        node: the name of the node.
        url: the address, for example "http://10.0.0.1:41234".
        token: the agent's secret, or the token of one run.
        process: the process id of the agent.
        domain: the failure domain of the node; "" for the node itself.
        host: the host name of the node.
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


@prepare_decoding
class StagedFile(msgspec.Struct, frozen=True, rename={"snapshots_to_keep": "slots"}):
    """A rank's data file is in memory, complete except for its checksums; or it is being copied.

    The rank writes the record, and then moves the file into the same directory. The record is valid
    only once the file is there. While the rank copies, the file is still a free slot, and a record
    of the kind "copying" says how far the copy is.

    Attributes:
        file: the file's entry in the manifest, without checksums.
        slot: the file's name as a free slot, before the rank moved it here.
        snapshots_to_keep: the number of committed snapshots to keep.
        stages: the stages that the rank requested.
        epoch: the epoch of the run at the save; None if an older version wrote the record.
        copied: in a record of the kind "copying", the bytes at the start of the file that the rank
            has copied.
    """

    file: FileEntry
    slot: FileName
    snapshots_to_keep: Count
    stages: tuple[RequestedStage, ...]
    epoch: Count | None = None
    copied: Count = 0


@prepare_decoding
class RingFile(
    msgspec.Struct,
    frozen=True,
    rename={"ranges": "of", "checksums": "sums"},
):
    """A copy or parity that a rank has made for other nodes from its replicas.

    The file may be incomplete: the agent adds the data that the rank did not have. The rank writes
    the record, and then moves the file into the same directory. The record is valid only once the
    file is there.

    Attributes:
        file: the name of the copy or parity, in the same directory.
        slot: the file's name as a free slot, before the rank moved it here.
        ranges: for each data file, the byte range that this copy or parity includes. It consists
            of whole blocks.
        checksums: for parity, the checksums of these blocks as this rank read them, 4 bytes each.
    """

    file: GeneratedFileName
    slot: FileName
    ranges: dict[str, tuple[Count, Count]]
    checksums: dict[str, bytes] = {}


@prepare_decoding
class PendingManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a save that is not committed yet, and everything else that its leader needs.

    The leader is the agent on the node of rank 0.

    Attributes:
        manifest: the manifest as JSON text, without its files; "" in the copies on other nodes.
        files: the name and node of each file, in the order of the manifest.
        nodes: the agents of all nodes of the run.
        leader: the name of the leader's node.
        storage: the root to which the checkpoint is persisted, and what to do there afterwards.
        epoch: the epoch of the run at the save.
        owner, previous_owner: for the claim to the root: the trainer's id, "" if it claims nothing;
            and the owner that the trainer has seen, None for any owner.
        durable: whether to persist the save in any case.
        rescue: whether to persist the save if a trainer is lost, although it is not `durable`.
        overwrite: whether to replace a checkpoint of the same step.
        copies, parity, group: the options of `Memory` for copies and parity.
        rings: for each ring, the names of its ranks' files. A ring is ranks of different nodes that
            hold the same data; see `trainer/rings.py`.
        fan_out: the number of nodes that a node asks; see `node_tree.py`.
        wait: seconds to wait for a node that does not answer.
        budget: bytes per second that each node may copy to storage; None for no limit.
    """

    save_id: SaveId
    step: Count
    manifest: str
    files: list[tuple[FileName, str]]
    nodes: list[AgentInfo]
    leader: str
    storage: StorageTask
    epoch: Count = 0
    owner: str = ""
    previous_owner: str | None = ""
    durable: bool = False
    rescue: bool = False
    overwrite: bool = False
    copies: Count = 0
    parity: Count = 0
    group: Count = 8
    rings: list[list[str]] = []
    fan_out: FanOut = MOST_FAN_OUT
    wait: Seconds = 60.0
    budget: Count | None = None


@prepare_decoding
class StageOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a stage ended for the cluster; or, for a file that could not be staged, why.

    Attributes:
        seconds: the duration of the stage.
        bytes: the bytes that were processed.
        failure: the reason why the stage failed; "" if it succeeded.
        node: the name of the node that wrote the record.
    """

    save_id: SaveId
    stage: AnyStage
    seconds: Seconds = 0.0
    bytes: Count = 0
    failure: str = ""
    node: str = ""


@prepare_decoding
class StageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a node and to all nodes below it in the tree, to do their part of a stage.

    Attributes:
        wait: seconds to wait for a node that does not answer.
    """

    save_id: SaveId
    stage: AnyStage
    wait: Seconds


@prepare_decoding
class SubtreeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a node and the nodes below it in the tree did for a stage; see `replies.py`.

    The numbers are columns of little-endian integers. A node and a file are given by their index in
    the lists of the pending manifest.

    Attributes:
        nodes: the nodes that did their part, 4 bytes each, in ascending order.
        nbytes: for each of them, the bytes that it processed, 8 bytes each.
        files: when a save is committed, the sealed files, 4 bytes each, in ascending order.
        entries: for each of them, the integers of its `FileEntry` after the rank, 8 bytes each.
        failures: for the first nodes that failed to do their part, the reasons.
        lost: for the first nodes that did not answer, what was wrong.
        own: how the stage ended on the node that replies, without the nodes below it.
        own_ended_at: when it ended there, in seconds since 1970.
    """

    save_id: SaveId
    stage: AnyStage
    nodes: bytes = b""
    nbytes: bytes = b""
    files: bytes = b""
    entries: bytes = b""
    failures: dict[str, str] = {}
    lost: dict[str, str] = {}
    own: StageOutcome | None = None
    own_ended_at: Seconds = 0.0


@prepare_decoding
class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Why this node tries a stage again. The record is removed when the stage ends on this node.

    Attributes:
        failure: the reason why the last attempt failed.
        since: the time when the first attempt failed, in seconds since 1970.
        attempts: the number of failed attempts.
    """

    save_id: SaveId
    stage: AnyStage
    failure: str
    since: float
    attempts: Count

    def describe(self, now: float) -> str:
        """Return why the stage is tried again, as text. `now` is in seconds since 1970."""
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        seconds = max(0.0, now - self.since)
        return f"failed {times} in {seconds:.0f} s, the agent tries again: {self.failure}"


@cache
def schema() -> str:
    """Return a digest of the fields and the encoding of all records.

    Versions of shardwise with the same digest can read each other's records.
    """
    kinds = [each for each in globals().values() if isinstance(each, type)]
    structs = [each for each in kinds if issubclass(each, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    encoded = msgspec.json.encode(components, order="deterministic")
    return hashlib.blake2b(encode_record(encoded.decode()), digest_size=8).hexdigest()


def save_record(stage: str, save_id: str, kind: RecordKind = "") -> str:
    """Return the name of a record of a save.

    `save_record("persist", id)` is the `StageRequest` of the stage `persist`, or of another stage.
    `save_record("pending", id)` is the `PendingManifest`, on the node that leads the save.

    Args:
        kind: "done" for the `SubtreeReply` of this node, "all" for the `StageOutcome` of the
            cluster, "told" for the `SubtreeReply` of this node once the nodes below it have this
            outcome; "retry" for the `Retry`; "copy" for the copy of the `PendingManifest` on all
            other nodes.
    """
    return f"{stage}-{kind}-{save_id}.json" if kind else f"{stage}-{save_id}.json"


def file_record(data_file: str, kind: str) -> str:
    """Return the name of a record of a data file.

    Args:
        kind: "staged" for the `StagedFile`; "failed" for the `StageOutcome` that says why the file
            could not be staged; "entry" for the `FileEntry` of the sealed file; "kept-0" for the
            `RingFile` of the first copy or parity chunk that the rank made, and so on; "copying"
            for the `StagedFile` that exists while the rank copies its data into memory.
    """
    return f"{data_file.removesuffix('.safetensors')}.{kind}.json"


def data_file_of(staged: str) -> str:
    """Return the name of the data file of a `StagedFile` record."""
    return f"{staged.removesuffix(STAGED_SUFFIX)}.safetensors"


def ring_file_name(record: str) -> str:
    """Return the name of a rank's copy or parity until the agent renames it, given its record."""
    return f"{record.removesuffix('.json')}.bin"


def saves_with(names: Iterable[str], stage: str, kind: RecordKind = "") -> list[str]:
    """Return the ids of the saves for which there is a `save_record` of this kind, sorted."""
    ids = {name: save_id_in_name(name) for name in names}
    return sorted(each for name, each in ids.items() if name == save_record(stage, each, kind))


def pending_records(names: Iterable[str]) -> list[str]:
    """Return the names of the pending manifests, and of the copies of others, among names."""
    return [
        save_record("pending", save_id, kind)
        for kind in PENDING_KINDS
        for save_id in saves_with(names, "pending", kind)
    ]


def is_restored(name: str) -> bool:
    """Return whether a restore reads a file of this name: data, a manifest or a pending manifest.

    Copies and parity are data.
    """
    return name.endswith(DATA_SUFFIXES) or name == MANIFEST or bool(pending_records([name]))


def save_id_in_name(name: str) -> str:
    """Return the save id in the name of a data file or a record; "" if there is none."""
    found = _SAVE_IN_NAME.search(name)
    return "" if found is None else found[1]


def rank_in_name(name: str) -> int:
    """Return the rank in the name of a slot, a data file or its record."""
    return int(name[1:].split("-")[0])


def is_ring_record(name: str) -> bool:
    """Return whether this is the name of a `RingFile` record."""
    return ".kept-" in name and name.endswith(".json")


def is_outcome(name: str) -> bool:
    """Return whether a record with this name has the outcome of a stage for the cluster."""
    return "-all-" in name and name.endswith(".json")
