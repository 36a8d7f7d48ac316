"""Calls and outcomes travel along a tree of nodes; a lost node costs only its own part."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    data_file,
    decode_manifest,
    encode_manifest,
    lay_out_file,
)
from shardwise.parts.memory import decide, records
from shardwise.parts.memory.agent import actions
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.files import encode_record, write_record
from shardwise.parts.memory.home import AGENT_LOCK, Home, SnapshotDirectory
from shardwise.parts.memory.node_tree import NodeTree, tree_of_nodes, tree_of_stage
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import (
    AgentInfo,
    Outcomes,
    PendingManifest,
    RankPart,
    StageOutcome,
)
from shardwise.parts.memory.remote.calls import (
    Caller,
    NextStep,
    StageCall,
    decide_next,
)
from shardwise.parts.memory.remote.client import Discarded
from shardwise.parts.memory.replies import MOST_REASONS, Replies, combine_replies
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import SaveStates, read_state, request_rescue
from shardwise.parts.memory.trainer.pending_saves import PendingSave
from shardwise.parts.memory.view import SnapshotView
from shardwise.parts.tiers.options import StorageTask
from tests.breadth import examples, mostly_long
from tests.memory.reconciling import agent_in_threads
from tests.memory.test_server import RUN, TOKEN, serve
from tests.tools.agents import until

STEP = 10
SAVE = f"{STEP:016x}"
STAGES = ("commit", "protect", "persist")


def pending_of(
    count: int, fan_out: int, *, files: bool = True, wait: float = 8.0
) -> PendingManifest:
    """The pending manifest of a save with a rank on each node."""
    names = [f"n{index}" for index in range(count)]
    return PendingManifest(
        save_id=SAVE,
        step=STEP,
        manifest="",
        files=[(data_file(rank, SAVE), name) for rank, name in enumerate(names)],
        nodes=[AgentInfo(name, "", "") for name in names],
        leader="n0",
        storage=StorageTask(root=""),
        fan_out=fan_out,
        wait=wait,
    )


# The tree.


@given(st.integers(1, 3000), st.integers(1, 32))
def test_every_node_but_the_first_is_asked_by_one_other(count: int, fan_out: int) -> None:
    tree = NodeTree(range(count), fan_out)  # type: ignore[arg-type]
    asked = [child for node in (0, 1, count - 1) for child in tree.children(node)]  # type: ignore[arg-type]
    assert max(len(tree.children(node)) for node in (0, count - 1)) <= fan_out  # type: ignore[arg-type]
    if count <= 200:
        asked = [child for node in range(count) for child in tree.children(node)]  # type: ignore[arg-type]
        assert sorted(asked) == list(range(1, count))


def test_thousands_of_nodes_make_three_levels() -> None:
    tree = NodeTree(range(2048), 32)  # type: ignore[arg-type]
    level, levels = [0], 0
    while level:
        level = [child for node in level for child in tree.children(node)]  # type: ignore[misc]
        levels += bool(level)
    assert levels == 3


def test_nodes_without_files_take_no_part_in_a_commit() -> None:
    pending = replace(pending_of(4, 2), files=[(data_file(0, SAVE), "n2")], leader="n1")
    assert tree_of_stage(pending, "commit", "n1").nodes == ("n1", "n2")
    assert tree_of_stage(pending, "persist", "n1").nodes == ("n1", "n2")
    assert tree_of_stage(pending, "persist", "n0").nodes == ("n0", "n2")
    assert tree_of_stage(pending, "protect", "n1").nodes == ("n1", "n0", "n2", "n3")
    tree = tree_of_nodes("n1", ["n0", "n1", "n2", "n3"], 2)
    assert tree.children("n1") == ("n0", "n2")
    assert tree.children("elsewhere") == ()


@given(st.integers(1, 200), st.integers(1, 32))
def test_a_node_knows_all_nodes_above_it(count: int, fan_out: int) -> None:
    names = [f"n{index}" for index in range(count)]
    tree = tree_of_nodes("n0", names, fan_out)
    assert tree.above("n0") == []
    for name in names:
        chain = [name, *tree.above(name)]
        assert chain[-1] == "n0"
        for below, above in itertools.pairwise(chain):
            assert below in tree.children(above)


# What is decided about a node that does not answer.


@given(st.floats(0, 200), st.floats(0.1, 100), st.booleans())
def test_a_node_is_lost_only_when_those_below_it_were_asked(
    silence: float, wait: float, asked_children: bool
) -> None:
    call = StageCall(pending_of(3, 2), "commit", "n0", wait)
    found = decide_next(silence, call, asked_children=asked_children)
    if silence < call.silence:
        assert found is NextStep.ASK_AGAIN
    if found is NextStep.GIVE_UP:
        assert asked_children
        assert silence >= wait
    if silence >= call.silence and not asked_children:
        assert found is NextStep.ASK_CHILDREN


# The columns of replies.


def entry_of(rank: int) -> FileEntry:
    return FileEntry(data_file(rank, SAVE), rank, 5000 + rank, 4096, 4096, 4100, 7 * rank)


def reply_of(rank: int) -> Replies:
    return Replies.of_node(rank, 100 + rank, {rank: entry_of(rank)})


@given(
    st.lists(st.lists(st.integers(0, 19), max_size=8), max_size=8),
    st.randoms(use_true_random=False),
)
def test_replies_that_overlap_are_combined_in_any_order(
    groups: list[list[int]], random: object
) -> None:
    pending = pending_of(20, 2)
    parts = [combine_replies([reply_of(each) for each in group], pending) for group in groups]
    replied = {each for group in groups for each in group}
    lost = [
        Replies(lost={f"n{each}": "gone"}) for each in range(20) if each in replied or each > 15
    ]
    found = combine_replies([*parts, *lost], pending)
    random.shuffle(parts)  # type: ignore[attr-defined]
    halves = [combine_replies(each, pending) for each in (parts[:2], parts[2:])]
    again = combine_replies([*lost, *halves], pending)
    expected = sorted(replied)
    for each in (found, again):
        decoded = Replies.decode(each.encode(SAVE), pending)
        assert decoded.nodes.tolist() == decoded.files.tolist() == expected
        assert decoded.nbytes.tolist() == [100 + rank for rank in expected]
        assert decoded.file_entries(pending) == {
            data_file(rank, SAVE): entry_of(rank) for rank in expected
        }
        assert decoded.lost == {f"n{each}": "gone" for each in range(16, 20) if each not in replied}


@pytest.mark.parametrize(
    "wrong",
    [
        {"save_id": "d" * 16},
        {"nodes": b"abc"},
        {"nodes": np.array([3], "<u4").tobytes()},
        {"nodes": np.array([1, 1], "<u4").tobytes(), "nbytes": bytes(16)},
        {"nodes": np.array([1, 0], "<u4").tobytes(), "nbytes": bytes(16)},
        {"nbytes": b""},
        {"nbytes": b"\xff" * 8},
        {"files": np.array([9], "<u4").tobytes()},
        {"entries": bytes(8)},
        {"entries": b"\xff" * 40},
    ],
    ids=str,
)
def test_replies_that_no_agent_writes_are_refused(wrong: dict[str, object]) -> None:
    pending, valid = pending_of(3, 2), reply_of(1).encode(SAVE)
    Replies.decode(valid, pending)
    with pytest.raises(StoreError, match="reply about save"):
        Replies.decode(replace(valid, **wrong), pending)


def test_reasons_are_bounded() -> None:
    many = [Replies(failures={f"n{each:03}": "x" * 10_000}) for each in range(100)]
    found = combine_replies(many, pending_of(1, 1))
    assert list(found.failures) == [f"n{each:03}" for each in range(MOST_REASONS)]
    assert max(map(len, found.failures.values())) == 2000


# Caller, with simulated nodes.


@dataclass
class SimulatedNodes:
    """All nodes of a save. A live node asks those below it as an agent does.

    Attributes:
        dead: the nodes that never answer.
        deaf: the nodes that answer, but have discarded the snapshot.
        asked: for each node, the nodes that have called it.
    """

    pending: PendingManifest
    dead: frozenset[str] = frozenset()
    deaf: frozenset[str] = frozenset()
    asked: dict[str, set[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, asker: str, stage: str = "commit") -> Replies:
        """What a node learns from those below it, and adds itself."""
        call = StageCall(self.pending, stage, "n0", self.pending.wait)
        children = call.tree.children(asker)
        below = Caller(SeenFrom(self, asker), call).call(children)  # type: ignore[arg-type]
        return combine_replies([below, reply_of(int(asker[1:]))], self.pending)


@dataclass
class SeenFrom:
    """The connections of a simulated node, with the methods of `Nodes`."""

    all: SimulatedNodes
    node: str

    def call(
        self, node: str, stage: str, top: str, *, patience: float, wait: float
    ) -> bytes | None:
        assert (stage, top, patience) == ("commit", "n0", self.all.pending.wait)
        if node in self.all.dead:
            raise StoreError(f"{node} does not answer")
        with self.all.lock:
            self.all.asked.setdefault(node, set()).add(self.node)
        if node in self.all.deaf:
            raise Discarded(f"{node} has it no more")
        return encode_record(self.all.ask(node).encode(SAVE))

    def raise_if_run_continued_without(self, nodes: Sequence[str]) -> None:
        pass

    def refuse_abandoned(self) -> None:
        pass

    def pause(self) -> None:
        time.sleep(0.001)


@examples(25)
@given(
    st.integers(1, 40), st.integers(1, 4), st.sets(st.integers(1, 39)), st.sets(st.integers(1, 39))
)
def test_each_lost_node_costs_only_its_own_part(
    count: int, fan_out: int, dead: set[int], deaf: set[int]
) -> None:
    pending = pending_of(count, fan_out, wait=0.02)
    gone = {each for each in dead if each < count}
    deaf = {each for each in deaf if each < count} - gone
    nodes = SimulatedNodes(
        pending, frozenset(f"n{each}" for each in gone), frozenset(f"n{each}" for each in deaf)
    )
    replies = nodes.ask("n0")
    missing = gone | deaf
    assert replies.nodes.tolist() == [each for each in range(count) if each not in missing]
    assert len(replies.file_entries(pending)) == count - len(missing)
    assert replies.lost.keys() <= {f"n{each}" for each in missing}
    assert len(replies.lost) == min(len(missing), MOST_REASONS)
    assert all(
        "has discarded step" in replies.lost[f"n{e}"] for e in deaf if f"n{e}" in replies.lost
    )


def test_a_node_that_answers_is_not_lost_because_another_cannot_reach_it() -> None:
    """Node 1 was silent for a while, so node 0 has called node 2 too, which node 1 cannot reach."""

    class CutOff(SeenFrom):
        def call(
            self, node: str, stage: str, top: str, *, patience: float, wait: float
        ) -> bytes | None:
            reply = reply_of(2) if node == "n2" else Replies(lost={"n2": "no route"})
            return encode_record(reply.encode(SAVE))

    pending = pending_of(3, 1)
    call = StageCall(pending, "commit", "n0", 8.0)
    caller = Caller(CutOff(SimulatedNodes(pending), "n0"), call)  # type: ignore[arg-type]
    assert caller.call(["n1", "n2"]).lost == {}


@pytest.mark.parametrize("had_it", [True, False])
def test_a_node_without_the_snapshot_has_discarded_it_or_not_begun(had_it: bool) -> None:
    """Its ranks may begin the save later than this node's; what it had it has no more."""
    answers: list[bytes | OSError | None] = [FileNotFoundError("no such snapshot")] * 3
    if had_it:
        answers.insert(0, None)
    answers.append(encode_record(reply_of(1).encode(SAVE)))

    class Changing(SeenFrom):
        def call(
            self, node: str, stage: str, top: str, *, patience: float, wait: float
        ) -> bytes | None:
            if isinstance(answer := answers.pop(0), OSError):
                raise answer
            return answer

    pending = pending_of(2, 2)
    call = StageCall(pending, "commit", "n0", 8.0)
    replies = Caller(Changing(SimulatedNodes(pending), "n0"), call).call(["n1"])  # type: ignore[arg-type]
    assert replies.nodes.tolist() == ([] if had_it else [1])
    assert ("has discarded step 10" in replies.lost.get("n1", "")) == had_it


def test_no_node_asks_more_than_its_children_when_all_answer() -> None:
    nodes = SimulatedNodes(pending_of(200, 6))
    assert len(nodes.ask("n0").nodes) == 200
    assert all(len(askers) == 1 for askers in nodes.asked.values())
    sent: dict[str, int] = {}
    for (asker,) in nodes.asked.values():
        sent[asker] = sent.get(asker, 0) + 1
    assert max(sent.values()) == 6


def test_who_stops_asking_is_not_kept_waiting() -> None:
    """The part of this node failed for now, and will be tried again with the others."""

    class Slow(SeenFrom):
        def call(
            self, node: str, stage: str, top: str, *, patience: float, wait: float
        ) -> bytes | None:
            time.sleep(0.01)
            return None

        def abort(self) -> None:
            pass

    call = StageCall(pending_of(3, 2), "commit", "n0", 60.0)
    caller = Caller(Slow(SimulatedNodes(call.pending), "n0"), call)  # type: ignore[arg-type]
    threading.Timer(0.1, caller.stop).start()
    started = time.monotonic()
    assert len(caller.call(["n1", "n2"]).nodes) == 0
    assert time.monotonic() - started < 5.0


# Real agents, in threads of this process.


@dataclass
class Cluster:
    """Nodes with agents and servers, each with the file of one rank."""

    homes: list[Home]
    infos: list[AgentInfo]
    stack: list[ExitStack]
    followers: list[Follower]

    def place(self, index: int, step: int = STEP) -> SnapshotDirectory:
        return SnapshotDirectory(self.homes[index].run(RUN), step, f"{step:016x}")

    def start(self, index: int) -> None:
        """Start the agent of a node that has only a server so far."""
        follower, home = self.followers[index], self.homes[index]
        self.stack[index].enter_context(agent_in_threads(home, f"n{index}", follower))

    def stage(self, root: Path, fan_out: int, wait: float, *, durable: bool = True) -> None:
        """Write what the ranks leave to the agents."""
        for rank in reversed(range(len(self.homes))):
            self.stage_file(rank, fan_out=fan_out)
        self.lead(root, fan_out=fan_out, wait=wait, durable=durable, copies=1)

    def lead(
        self,
        root: Path,
        step: int = STEP,
        *,
        ranks: Sequence[int] | None = None,
        fan_out: int = 2,
        wait: float = 8.0,
        durable: bool = False,
        copies: int = 0,
        damage: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        """Write what rank 0 leaves to the agent that leads the save; these ranks have files."""
        place = self.place(0, step)
        ranks = range(len(self.homes)) if ranks is None else ranks
        manifest = Manifest(
            save_id=place.save_id,
            step=step,
            created="now",
            world_size=len(self.homes),
            files=(),
            objects=(),
            tensors=Raw(b"[]"),
        )
        pending = PendingManifest(
            save_id=place.save_id,
            step=step,
            manifest=encode_manifest(manifest).decode(),
            files=[(data_file(rank, place.save_id), self.infos[rank].node) for rank in ranks],
            nodes=self.infos,
            leader=self.infos[0].node,
            storage=StorageTask(root=str(root)),
            saved_at=float(step),
            durable=durable,
            copies=copies,
            group=4,
            fan_out=fan_out,
            wait=wait,
        )
        write_record(place.path / records.PENDING, damage(encode_record(pending)))
        self.homes[0].wake()

    def stage_file(
        self,
        rank: int,
        step: int = STEP,
        *,
        fan_out: int = 2,
        stages: tuple[str, ...] = STAGES,
        snapshots_to_keep: int = 2,
        has_file: bool = True,
        damage: Callable[[bytes], bytes] = lambda data: data,
    ) -> None:
        """Write what the rank of a node leaves to its agent."""
        place = self.place(rank, step)
        header, entry = lay_out_file(place.save_id, rank, (b"{}", 0))
        place.path.mkdir(parents=True, exist_ok=True)
        infos = {info.node: info for info in self.infos}
        tree = tree_of_nodes(self.infos[0].node, infos, fan_out)
        part = RankPart(
            file=entry if has_file else None,
            snapshots_to_keep=snapshots_to_keep,
            stages=stages,
            epoch=0,
            above=[infos[node] for node in tree.above(self.infos[rank].node)],
        )
        write_record(place.path / records.rank_record(rank), damage(encode_record(part)))
        if has_file:
            (place.path / entry.name).write_bytes(header.ljust(entry.size, b"\0"))
        self.homes[rank].wake()

    def outcome(self, index: int, stage: str, step: int = STEP) -> StageOutcome | None:
        return read_state(self.place(index, step)).outcomes.get(stage)

    def failure(self, index: int, stage: str, step: int = STEP) -> str:
        """Wait until a stage has ended; return why it failed, or nothing."""
        until(lambda: self.outcome(index, stage, step), 5.0)
        outcome = self.outcome(index, stage, step)
        assert outcome is not None
        return outcome.failure


@contextmanager
def cluster(
    tmp_path: Path, count: int, *, without_agent: Collection[int] = ()
) -> Iterator[Cluster]:
    with ExitStack() as all_nodes:
        homes, infos, stacks, followers = [], [], [], []
        for index in range(count):
            home = Home(tmp_path / f"n{index}")
            own = all_nodes.enter_context(ExitStack())
            follower = Follower(f"n{index}", MappedFiles())
            if index not in without_agent:
                own.enter_context(agent_in_threads(home, f"n{index}", follower))
            served = own.enter_context(
                serve(home.path, wake=home.wake, calls=follower.calls, states=follower.states)
            )
            followers.append(follower)
            homes.append(home)
            infos.append(AgentInfo(f"n{index}", f"http://127.0.0.1:{served.port}", TOKEN))
            stacks.append(own)
        yield Cluster(homes, infos, stacks, followers)


@pytest.mark.parametrize("fan_out", mostly_long([1, 2, 32], [2]))
def test_a_save_is_completed_through_the_tree(tmp_path: Path, fan_out: int) -> None:
    with cluster(tmp_path, 6) as nodes:
        nodes.stage(tmp_path / "root", fan_out, 20.0)
        for stage in ("commit", "protect", "persist"):
            for index in range(6):
                until(lambda i=index, s=stage: nodes.outcome(i, s))
                outcome = nodes.outcome(index, stage)
                assert outcome is not None
                assert not outcome.failure
        published = (tmp_path / "root" / "step-00000010" / MANIFEST).read_bytes()
        assert [each.rank for each in decode_manifest(published).files] == list(range(6))
        for index in range(6):
            place = nodes.place(index)
            assert place.read_file(MANIFEST) == published
            assert len(place.list_names(".safetensors")) == 2  # its own, and a copy
            pending = place.read_pending()
            assert pending is not None
            assert bool(pending.manifest) == (index == 0)
            assert read_state(place).entries.keys() == {data_file(index, SAVE)}


@pytest.mark.parametrize("lost", [1, 5])
def test_the_nodes_below_a_lost_node_are_told_and_their_files_stored(
    tmp_path: Path, lost: int
) -> None:
    """It is lost after it has staged its file, or copies could not replace it."""
    with cluster(tmp_path, 6) as nodes:
        nodes.stage(tmp_path / "root", 2, 4.0)
        until(lambda: nodes.outcome(lost, "protect") or nodes.outcome(0, "protect"))
        nodes.stack[lost].close()
        rest = [index for index in range(6) if index != lost]
        for stage in ("commit", "protect", "persist"):
            for index in rest:
                until(lambda i=index, s=stage: nodes.outcome(i, s))
        outcome = nodes.outcome(0, "persist")
        assert outcome is not None
        assert not outcome.failure


def test_a_commit_fails_if_a_node_with_files_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, 6) as nodes:
        nodes.stack[2].close()
        nodes.stage(tmp_path / "root", 2, 1.0)
        for index in (0, 1, 3, 4, 5):  # 5 is below 2
            until(lambda i=index: nodes.outcome(i, "commit"))
            outcome = nodes.outcome(index, "commit")
            assert outcome is not None
            assert "node n2 did not do its part of commit" in outcome.failure


@pytest.mark.long
def test_another_node_persists_a_snapshot_when_the_leader_is_lost(tmp_path: Path) -> None:
    with cluster(tmp_path, 6) as nodes:
        nodes.stage(tmp_path / "root", 2, 60.0, durable=False)
        for index in range(6):
            until(lambda i=index: nodes.outcome(i, "protect"))
        nodes.stack[0].close()
        started = time.monotonic()
        place = nodes.place(4)
        request_rescue(nodes.followers[4].states, place, "n4")
        nodes.homes[4].wake()
        until(lambda: nodes.outcome(4, "persist"))
        outcome = nodes.outcome(4, "persist")
        assert outcome is not None
        assert (outcome.failure, outcome.node) == ("", "n4")
        assert time.monotonic() - started < 40.0
        # The others ask the leader, which is lost.
        assert all(nodes.outcome(index, "persist") is None for index in (1, 2, 3, 5))
        published = (tmp_path / "root" / "step-00000010" / MANIFEST).read_bytes()
        assert [each.rank for each in decode_manifest(published).files] == list(range(6))


# What fails or is late concerns one save, and no other.


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """A function that damages a record which contains these bytes once."""

    def damage(data: bytes) -> bytes:
        assert data.count(old) == 1
        return data.replace(old, new)

    return damage


@pytest.mark.parametrize("name", [MANIFEST, records.PENDING])
def test_a_damaged_manifest_on_the_node_above_fails_its_save_and_no_other(
    tmp_path: Path, name: str
) -> None:
    """The rank of node 1 has no file, so node 0 needs node 1 for nothing."""
    with cluster(tmp_path, 2, without_agent=[1]) as nodes:
        nodes.stage_file(0)
        nodes.stage_file(1, has_file=False)
        if name == MANIFEST:
            nodes.lead(tmp_path / "root", ranks=[0])
            assert nodes.failure(0, "protect") == ""
            path = nodes.place(0).manifest_path
            path.write_bytes(replaced(b"world", b"wOrld")(path.read_bytes()))
        else:
            damage = replaced(b'"durable"', b'"Durable"')
            nodes.lead(tmp_path / "root", ranks=[0], damage=damage)
            assert "pending manifest" in nodes.failure(0, "commit")
        nodes.start(1)
        assert "manifest" in (failure := nodes.failure(1, "commit"))
        assert "damaged" in failure
        for index in (0, 1):
            nodes.stage_file(index, STEP + 1, stages=("commit", "protect"))
        nodes.lead(tmp_path / "root", STEP + 1)
        for stage in ("commit", "protect"):
            assert [nodes.failure(index, stage, STEP + 1) for index in (0, 1)] == ["", ""]


def test_a_call_that_comes_before_the_pending_manifest_fetches_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 follows an older save, and hears of what is new there only once in a while."""
    monkeypatch.setattr(actions, "OUTCOMES_WAIT", 4.0)
    with cluster(tmp_path, 2) as nodes:
        for index in (0, 1):
            nodes.stage_file(index)
        nodes.lead(tmp_path / "root")
        assert nodes.failure(1, "protect") == ""
        nodes.stage_file(0, STEP + 1, stages=("commit", "protect"))
        nodes.lead(tmp_path / "root", STEP + 1)
        time.sleep(0.3)
        nodes.stage_file(1, STEP + 1, stages=("commit", "protect"))
        started = time.monotonic()
        assert nodes.failure(0, "commit", STEP + 1) == ""
        assert time.monotonic() - started < 2.0
        assert nodes.outcome(1, "persist") is None
        assert nodes.failure(1, "protect", STEP + 1) == ""
        nodes.followers[0].states.end(nodes.place(0), {"persist": StageOutcome()})
        assert nodes.failure(1, "persist") == ""


@pytest.mark.parametrize("has_earlier", [False, True])
def test_a_damaged_record_of_a_rank_fails_the_commit_at_once(
    tmp_path: Path, has_earlier: bool
) -> None:
    """The record names the nodes above. From an earlier save, its node knows them as well."""
    why = "rank-00001.json: the record is damaged"
    with cluster(tmp_path, 2) as nodes:
        if has_earlier:
            for index in (0, 1):
                nodes.stage_file(index, stages=("commit", "protect"))
            nodes.lead(tmp_path / "root")
            assert nodes.failure(1, "protect") == ""
        nodes.stage_file(0, STEP + 1)
        nodes.stage_file(1, STEP + 1, damage=replaced(b'"commit"', b'"cOmmit"'))
        nodes.lead(tmp_path / "root", STEP + 1, wait=60.0)
        assert why in nodes.failure(0, "commit", STEP + 1)
        if has_earlier:
            assert why in nodes.failure(1, "commit", STEP + 1)


def test_a_rank_that_hears_late_of_a_save_never_sees_its_commit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is in storage, and node 0 has freed it before node 1 hears of it."""

    def write_and_pause(path: Path, record: object) -> None:
        write_record(path, record)
        time.sleep(0.05)  # so the rank sees each state of the save

    with cluster(tmp_path, 2, without_agent=[1]) as nodes, nodes.homes[1].lock(AGENT_LOCK):
        nodes.stage_file(0, snapshots_to_keep=1)
        nodes.stage_file(1, has_file=False)
        nodes.lead(tmp_path / "root", ranks=[0], durable=True)
        assert nodes.failure(0, "persist") == ""
        nodes.stage_file(0, STEP + 1, snapshots_to_keep=1)
        nodes.lead(tmp_path / "root", STEP + 1, ranks=[0])
        until(lambda: not nodes.place(0).path.exists(), 5.0)
        monkeypatch.setattr("shardwise.parts.memory.states.write_record", write_and_pause)
        options = Memory(dir=str(tmp_path / "n1"), wait=5.0)
        save = PendingSave(nodes.homes[1], options, 1, nodes.place(1), STAGES, logs_failures=False)
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(save.wait_until_ended)
            nodes.start(1)
            assert waits.result(5.0)


def test_nobody_is_asked_for_a_run_that_has_had_no_trainer_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "UNTIL_UNFOLLOWED", 0.2)
    monkeypatch.setattr(decide, "UNTIL_UNFOLLOWED", 0.2)
    with cluster(tmp_path, 2) as nodes:
        nodes.stack[0].close()
        trainer = RankLock(nodes.homes[1].run(RUN), 1)
        nodes.stage_file(1)
        heard_at = nodes.followers[1].states.heard_at
        until(lambda: RUN in heard_at, 5.0)
        asked_since = dict(heard_at)
        time.sleep(0.4)
        assert heard_at == asked_since
        trainer.release()
        until(lambda: not heard_at, 5.0)


def test_a_commit_that_has_ended_does_not_fail_afterwards(tmp_path: Path) -> None:
    """The agent may decide that a snapshot is late just before its commit ends."""
    states, run = SaveStates(), Home(tmp_path).run("0" * 16)
    for number, ended in enumerate(({"commit": StageOutcome()}, {})):
        place = SnapshotDirectory(run, 1, f"{number:016x}")
        place.path.mkdir(parents=True)
        states.end(place, ended)
        assert states.fail_commit(place, "it is late") == (not ended)
        assert read_state(place).outcomes["commit"].failure == ("" if ended else "it is late")


class _OutcomesOnly:
    """A node above that knows nothing yet; nobody may read its files."""

    def read_outcomes(self, run: str, version: int, wait: float) -> Outcomes:
        return Outcomes(1, 0.0, {})


@pytest.mark.parametrize("knows_above", [True, False])
def test_a_pending_manifest_is_copied_only_from_a_node_that_ranks_of_the_save_have_named(
    tmp_path: Path, knows_above: bool
) -> None:
    """If the record of its rank is damaged, this node may lead the save itself."""
    info = AgentInfo("above", "http://127.0.0.1:1", "")
    follower = Follower("here", MappedFiles(), clients={info: _OutcomesOnly()})  # type: ignore[dict-item]
    part = RankPart(file=None, snapshots_to_keep=2, stages=STAGES, epoch=0, above=[info])
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1, "0" * 16)
    view = SnapshotView(
        place=place, parts=(part,) * knows_above, is_unreadable=not knows_above, stages={}
    )
    context = pytest.raises(AttributeError, match="read") if knows_above else nullcontext()
    with context:
        follower._ask_above(place.run, [info], [view], {})
