"""The records that the trainers and the agent of a node write next to the files of a snapshot.

    rank-00003.json   `RankPart`: what rank 3 has copied, written by rank 3
    pending.json      `PendingManifest`: written by rank 0; a copy without the manifest elsewhere
    save.json         `SaveState`: how far the save is, written by the agent of the node
    manifest.json     written by the agent when the snapshot is committed

A record is a JSON file. One process writes it, atomically. All are small, except the pending
manifest of a save with many tensors on the node of rank 0. The records on a node determine
what the agent does next. So if an agent is killed, the next agent continues the work.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Annotated

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.manifest.manifest import MANIFEST, Count, FileEntry, save_id_of_file
from shardwise.parts.memory.files import FileName, SaveId, encode_record
from shardwise.parts.tiers.options import StorageTask

Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
MOST_FAN_OUT = 32
FanOut = Annotated[int, msgspec.Meta(ge=1, le=MOST_FAN_OUT)]
Stage = Annotated[str, msgspec.Meta(pattern=r"\A(commit|protect|persist|retain)\Z")]

DATA_SUFFIXES = (".safetensors", ".bin")
"""The suffixes of data files, copies and parity."""
STAGES = ("commit", "protect", "persist")
"""The stages of a save. Each ends on all nodes with an outcome."""
RESCUE = "rescue"
"""The request to persist a save that was for memory only, after a trainer was lost."""
REMOVE_OLD = "retain"
"""The stage that follows `persist` and removes old checkpoints. Only closing a run waits for it."""
PENDING, STATE = "pending.json", "save.json"


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
class RunInfo(msgspec.Struct, frozen=True):
    """What a node knows about a run: the record `run.json` of the run.

    Attributes:
        root: the root of the run's checkpoints.
        nodes: the agents of the nodes that take part in the run, after those that did earlier.
    """

    root: str
    nodes: list[AgentInfo] = []


@prepare_decoding
class RingFile(msgspec.Struct, frozen=True, rename={"ranges": "of", "checksums": "sums"}):
    """A copy or parity that a rank has made for other nodes from its replicas.

    The file may be incomplete: the agent renames it to `name`, after it has added the data that the
    rank did not have.

    Attributes:
        file: the name of the file until then, in the same directory.
        name: the name of the copy or parity.
        ranges: for each data file, the byte range that this copy or parity includes. It consists
            of whole blocks.
        checksums: for parity, the checksums of these blocks as this rank read them, 4 bytes each.
    """

    file: FileName
    name: FileName
    ranges: dict[str, tuple[Count, Count]]
    checksums: dict[str, bytes] = {}


@prepare_decoding
class RankPart(msgspec.Struct, frozen=True, kw_only=True, rename={"snapshots_to_keep": "slots"}):
    """A rank's part of a snapshot.

    The rank writes the record before it copies its data into a slot, and renames the slot to the
    name of its file afterwards. So the part is staged once its file is there.

    Attributes:
        file: the entry of the rank's file in the manifest, without checksums; None without a file.
        snapshots_to_keep: the number of committed snapshots to keep.
        stages: the stages that the rank requested.
        epoch: the epoch of the run at the save.
        wait: the option `Memory(wait=…)`.
        copied: the bytes at the start of the file that the rank has copied.
        failure: why the part could not be staged; "" if it could, or is still being copied.
        made: the copies and parity that the rank has made for other nodes.
        above: the agents of the nodes above this node in the tree of the run, nearest first. They
            know how stages have ended. Empty on the node that leads the save.
    """

    file: FileEntry | None
    snapshots_to_keep: Count
    stages: tuple[Stage, ...]
    epoch: Count
    wait: Seconds = 60.0
    copied: Count = 0
    failure: str = ""
    made: tuple[RingFile, ...] = ()
    above: list[AgentInfo] = []

    def __post_init__(self) -> None:
        """Refuse the name of another kind of file, which may be outside of the directory."""
        if self.file is not None and save_id_of_file(self.file.name) is None:
            raise ValueError(f"{self.file.name!r} is not the name of a data file")


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
        saved_at: the time of the save on rank 0, in seconds since 1970. A later save of the same
            step and epoch replaces this one.
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
    saved_at: Seconds = 0.0
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
    """How a stage ended, on one node or on all nodes.

    Attributes:
        seconds: the duration of the stage.
        bytes: the bytes that were processed.
        failure: the reason why the stage failed; "" if it succeeded.
        node: the name of the node that wrote this.
        ended_at: the time when the stage ended, in seconds since 1970.
    """

    seconds: Seconds = 0.0
    bytes: Count = 0
    failure: str = ""
    node: str = ""
    ended_at: Seconds = 0.0


@prepare_decoding
class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node tries a stage again.

    Attributes:
        failure: the reason why the last attempt failed.
        since: the time when the first attempt failed, in seconds since 1970.
        attempts: the number of failed attempts.
    """

    failure: str
    since: float
    attempts: Count

    def describe(self, now: float) -> str:
        """Return why the stage is tried again, as text. `now` is in seconds since 1970."""
        times = "once" if self.attempts == 1 else f"{self.attempts} times"
        seconds = max(0.0, now - self.since)
        return f"failed {times} in {seconds:.0f} s, the agent tries again: {self.failure}"


@prepare_decoding
class SaveState(msgspec.Struct, frozen=True, kw_only=True):
    """How far a save is, as one node knows it. Only the agent of the node writes this record.

    Attributes:
        entries: the entries of this node's files that are sealed, with checksums.
        parts: how stages ended on this node, without other nodes.
        outcomes: how stages ended on all nodes.
        retries: the stages that this node tries again. They are removed when the stage ends here.
        rescue: the node that has requested to persist the save, because a trainer was lost; "" if
            none has.
        rescue_sent: whether this node has requested that, from itself or from another node.
    """

    entries: dict[FileName, FileEntry] = {}
    parts: dict[Stage, StageOutcome] = {}
    outcomes: dict[Stage, StageOutcome] = {}
    retries: dict[Stage, Retry] = {}
    rescue: str = ""
    rescue_sent: bool = False


@prepare_decoding
class SubtreeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a node and the nodes below it in the tree did for a stage; see `replies.py`.

    The numbers are columns of little-endian integers. A node and a file are given by their index in
    the lists of the pending manifest.

    Attributes:
        save_id: the id of the save.
        nodes: the nodes that did their part, 4 bytes each, in ascending order.
        nbytes: for each of them, the bytes that it processed, 8 bytes each.
        files: when a save is committed, the sealed files, 4 bytes each, in ascending order.
        entries: for each of them, the integers of its `FileEntry` after the rank, 8 bytes each.
        failures: for the first nodes that failed to do their part, the reasons.
        lost: for the first nodes that did not answer, what was wrong.
    """

    save_id: SaveId
    nodes: bytes = b""
    nbytes: bytes = b""
    files: bytes = b""
    entries: bytes = b""
    failures: dict[str, str] = {}
    lost: dict[str, str] = {}


@prepare_decoding
class Outcomes(msgspec.Struct, frozen=True):
    """The outcomes of a run's stages that a node tells the nodes below it.

    Attributes:
        version: a number that changes with the outcomes.
        silence: for how many seconds the node has not heard of the node that leads the saves.
        saves: by the id of the save and the stage, how the stage ended on all nodes.
    """

    version: int
    silence: Seconds
    saves: dict[SaveId, dict[Stage, StageOutcome]]


@prepare_decoding
class Failing(msgspec.Struct, frozen=True):
    """A save or run on which an agent has failed to work, again and again.

    Attributes:
        run: the id of the run.
        step: the step of the save; None if the agent cannot observe the run at all.
        seconds: the time since the first failure.
        failure: the last failure.
    """

    run: str
    step: Count | None
    seconds: Seconds
    failure: str


@cache
def schema() -> str:
    """Return a digest of the fields, descriptions and encoding of the records and replies here.

    Versions of shardwise with the same digest can read each other's records.
    """
    kinds = [each for each in globals().values() if isinstance(each, type)]
    structs = [each for each in kinds if issubclass(each, msgspec.Struct)]
    _, components = msgspec.json.schema_components(structs)
    encoded = msgspec.json.encode(components, order="deterministic")
    return hashlib.blake2b(encode_record(encoded.decode()), digest_size=8).hexdigest()


def rank_record(rank: int) -> str:
    """Return the name of the `RankPart` of a rank."""
    return f"rank-{rank:05d}.json"


def is_rank_record(name: str) -> bool:
    """Return whether this is the name of a `RankPart`."""
    return name.startswith("rank-") and name.endswith(".json")


def rank_in_name(name: str) -> int:
    """Return the rank in the name of a data file, or of a `RankPart`."""
    return int(name.removeprefix("rank-").removeprefix("r").partition("-")[0].partition(".")[0])


def is_data(name: str) -> bool:
    """Return whether this is the name of a data file, a copy or parity that is complete."""
    return name.endswith(DATA_SUFFIXES) and not name.startswith(".")


def is_restored(name: str) -> bool:
    """Return whether a restore reads a file of this name: data, a manifest or a pending manifest.

    Copies and parity are data.
    """
    return is_data(name) or name in (MANIFEST, PENDING)
