"""What several nodes want is read from storage once, also when ranks fail in the middle."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.conftest import PRELOAD
from tests.tools.gang import Gang
from tests.tools.throttled_store import Meter, ThrottledStore
from tests.tools.watched_stores import BLOCK

ROWS, COLUMNS = 64, 4096
TENSORS = 16
NBYTES = TENSORS * ROWS * COLUMNS * 4
FAST = 20e9
STAGING = 4 << 20
SOON = 40.0  # on a busy machine
PATIENT = {"timeout": 120.0, "group_timeout": 60.0}  # longer than SOON
READ = "shardwise.kernel.engine.data_reader.DataReader.read"
Fault = Callable[[], AbstractContextManager[object]]
Part = Callable[[int, int], sw.Box]


def reference(i: int) -> torch.Tensor:
    """Values that tell where they belong."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + i


def whole(rank: int, world: int) -> sw.Box:
    return sw.Box((0, 0), (ROWS, COLUMNS))


def columns(rank: int, world: int) -> sw.Box:
    return sw.Box((0, COLUMNS // world * rank), (ROWS, COLUMNS // world))


def rows(rank: int, world: int) -> sw.Box:
    return sw.Box((ROWS // world * rank, 0), (ROWS // world, COLUMNS))


def overlapping_rows(rank: int, world: int) -> sw.Box:
    """Each rank wants most of the rows of the rank before it, and rows that nobody else wants."""
    first = max(ROWS // world * rank - 5, 0)
    return sw.Box((first, 0), (ROWS // world * (rank + 1) - first, COLUMNS))


def state_of(part: Part) -> tuple[sw.Box, dict[str, object]]:
    box = part(dist.get_rank(), dist.get_world_size())
    shape = (ROWS, COLUMNS)
    return box, {
        f"t{i}": sw.Shards(shape, torch.float32, [(box, torch.zeros(box.shape))])
        for i in range(TENSORS)
    }


def save_rows(path: str) -> None:
    box, state = state_of(rows)
    for i in range(TENSORS):
        _fragment(state, i).copy_(reference(i)[box.slices()])
    sw.save(path, state)


def _fragment(state: dict[str, object], i: int) -> torch.Tensor:
    shards = state[f"t{i}"]
    assert isinstance(shards, sw.Shards)
    return shards.fragments[0].data


def on_nodes(per_node: int) -> AbstractContextManager[object]:
    """Let this process take part as if every `per_node` ranks ran on a node of their own."""
    name = f"node {dist.get_rank() // per_node}"
    return patch("shardwise.parts.sharing.node_ranks.node_name", lambda: name)


def open_files() -> dict[str, str]:
    """What each file descriptor of this process refers to; the listing has one, too."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


def load_parts(
    path: str,
    part: Part,
    per_node: int = 1,
    *,
    once: bool | None = True,
    prefix: str = "",
    rate: float = FAST,
    fault: tuple[int, Fault] | None = None,
) -> tuple[int, int, int]:
    """Load a part of every tensor. Bytes that this rank and all ranks read, and those received."""
    box, state = state_of(part)
    meter = Meter(f"{path}.meter", rate)
    before = meter.bytes_read()
    dist.barrier()
    threads = set(threading.enumerate())
    files = open_files()
    with ExitStack() as stack:
        stack.enter_context(on_nodes(per_node))
        if fault is not None and dist.get_rank() == fault[0]:
            stack.enter_context(fault[1]())
        place = ThrottledStore(path, meter) if Path(path).is_dir() else path
        report = sw.load(
            place,
            state,
            read_once=once,
            staging_bytes=STAGING,
            rename=lambda name: prefix + name,
        )
    for i in range(TENSORS):
        assert torch.equal(_fragment(state, i), reference(i)[box.slices()])
    dist.barrier()
    assert set(threading.enumerate()) <= threads
    assert len(open_files()) <= len(files), (files, open_files())
    return report.bytes_read, meter.bytes_read() - before, report.bytes_received


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 16 MiB, divided by rows among four ranks."""
    path = str(tmp_path_factory.mktemp("once") / "checkpoint")
    gang.run(save_rows, path, world=4)
    return path


@pytest.mark.parametrize(
    ("world", "per_node"),
    mostly_long([(2, 1), (3, 1), (4, 1), (4, 2), (4, 3)], [(3, 1), (4, 2), (4, 3)]),
)
def test_replicas_on_nodes_read_the_state_once(
    gang: Gang, saved: str, world: int, per_node: int
) -> None:
    loads = gang.run(load_parts, saved, whole, per_node, world=world)
    own = [read for read, _, _ in loads]
    nodes = -(-world // per_node)
    assert NBYTES <= sum(own) <= NBYTES + 4 * BLOCK
    assert sum(received for _, _, received in loads) == (nodes - 1) * sum(own)
    assert NBYTES <= loads[0][1] <= 1.02 * NBYTES  # with manifest and checksums
    assert max(own) <= 1.2 * NBYTES / world


@pytest.mark.parametrize(
    ("part", "world", "per_node"),
    mostly_long(
        [
            (part, *nodes)
            for part in (columns, overlapping_rows)
            for nodes in ((2, 1), (4, 1), (4, 2), (4, 3))
        ],
        [(columns, 2, 1), (columns, 4, 3), (overlapping_rows, 4, 2)],
    ),
)
def test_what_only_some_nodes_want_is_read_once(
    gang: Gang, saved: str, part: Part, world: int, per_node: int
) -> None:
    loads = gang.run(load_parts, saved, part, per_node, world=world)
    assert sum(read for read, _, _ in loads) <= NBYTES + 3 * TENSORS * BLOCK
    assert sum(received for _, _, received in loads) > 0


def test_what_nobody_shares_is_read_alone(gang: Gang, saved: str) -> None:
    loads = gang.run(load_parts, saved, rows, world=2)
    assert [received for _, _, received in loads] == [0, 0]


def test_nodes_read_alone_on_request(gang: Gang, saved: str) -> None:
    loads = gang.run(load_parts, saved, whole, once=False, world=2)
    assert [received for _, _, received in loads] == [0, 0]
    assert all(read >= NBYTES for read, _, _ in loads)


def load_by_default(path: str) -> int:
    with patch("shardwise.parts.sharing.agreement.FEWEST_BYTES_SPARED", 1):
        return load_parts(path, whole, once=None)[2]


def test_nodes_share_by_default_what_all_read_from_storage(gang: Gang, saved: str) -> None:
    assert all(each > 0 for each in gang.run(load_by_default, saved, world=2))


def load_from_disk(path: str) -> int:
    _, state = state_of(whole)
    with on_nodes(1), patch("shardwise.parts.sharing.agreement.FEWEST_BYTES_SPARED", 1):
        return sw.load(path, state).bytes_received


def test_nodes_read_their_own_disk_alone(gang: Gang, saved: str) -> None:
    assert gang.run(load_from_disk, saved, world=2) == [0, 0]


def test_small_states_are_not_shared_by_default(gang: Gang, saved: str) -> None:
    loads = gang.run(load_parts, saved, whole, once=None, world=2)
    assert [received for _, _, received in loads] == [0, 0]


@pytest.mark.long
@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_eight_ranks_read_the_state_once(saved: str, per_node: int) -> None:
    with Gang(8, preload=PRELOAD) as eight:
        loads = eight.run(load_parts, saved, whole, per_node, world=8, timeout=120.0)
        assert sum(read for read, _, _ in loads) <= 1.02 * NBYTES
        assert loads[0][1] <= 1.02 * NBYTES
        eight.run(load_parts, saved, overlapping_rows, per_node, world=8, timeout=120.0)
        eight.run(load_parts, saved, columns, per_node, world=8, timeout=120.0)


def alternating_halves(rank: int, world: int) -> sw.Box:
    """Every second rank wants the same rows."""
    return sw.Box((ROWS // 2 * (rank % 2), 0), (ROWS // 2, COLUMNS))


def load_in_circles(
    path: str, part: Part, fault: tuple[int, Fault] | None = None
) -> tuple[int, int]:
    """Load while at most two nodes share their reads. Bytes that this rank reads and receives."""
    with patch("shardwise.parts.sharing.node_ranks.MOST_NODES", 2):
        read, _, received = load_parts(path, part, fault=fault)
    return read, received


def test_nodes_share_their_reads_in_circles(gang: Gang, saved: str) -> None:
    loads = gang.run(load_in_circles, saved, whole, world=4)
    assert 2 * NBYTES <= sum(read for read, _ in loads) <= 2 * NBYTES + 8 * BLOCK
    assert sum(received for _, received in loads) == sum(read for read, _ in loads)


def test_nodes_that_want_the_same_are_in_a_circle(gang: Gang, saved: str) -> None:
    loads = gang.run(load_in_circles, saved, alternating_halves, world=4)
    assert NBYTES <= sum(read for read, _ in loads) <= NBYTES + 8 * BLOCK
    assert all(received > 0 for _, received in loads)


@pytest.mark.long
def test_a_rank_that_fails_in_a_circle_is_named_on_all_ranks(gang: Gang, saved: str) -> None:
    fault = 3, refuse_connections
    outcomes = gang.run_outcomes(load_in_circles, saved, whole, fault, world=4)
    for outcome in outcomes:
        assert isinstance(outcome.exception, sw.RankError), outcome
        assert "rank 3" in str(outcome.exception) or outcome.rank == 3


def save_foreign(path: Path) -> str:
    """The same tensors in a file without checksums."""
    torch.save({f"t{i}": reference(i) for i in range(TENSORS)}, path)
    return str(path)


def test_foreign_checkpoints_are_read_once(gang: Gang, tmp_path: Path) -> None:
    path = save_foreign(tmp_path / "tensors.pt")
    loads = gang.run(load_parts, path, whole, prefix="model.", world=3)
    assert sum(read for read, _, _ in loads) <= NBYTES + TENSORS * BLOCK
    assert all(received > 0 for _, _, received in loads)


def edge_state(fill: bool) -> dict[str, object]:
    """Empty tensors, scalars, ties, and small tensors that share blocks."""
    torch.manual_seed(1)
    tied = torch.randn(300, 70)
    state: dict[str, object] = {
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(3.5),
        "tied": tied,
        "same": tied,
        "half": torch.randn(1000, 33).to(torch.bfloat16),
        "small": {str(i): torch.randn(i + 1) for i in range(200)},
        "large": torch.randn(700, 1001),
        "epoch": 7,
        "rank": sw.PerRank(dist.get_rank()),
    }
    return state if fill else _zeroed(state)


def _zeroed(state: dict[str, object]) -> dict[str, object]:
    made: dict[int, torch.Tensor] = {}
    found: dict[str, object] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found[name] = _zeroed(value)
        elif isinstance(value, torch.Tensor):
            found[name] = made.setdefault(id(value), torch.zeros_like(value))
        else:
            found[name] = sw.PerRank(-1) if isinstance(value, sw.PerRank) else 0
    return found


def load_edges(path: str, per_node: int) -> None:
    sw.save(path, edge_state(fill=True))
    loaded = {}
    for once in (True, False):
        state = edge_state(fill=False)
        with on_nodes(per_node):
            report = sw.load(path, state, read_once=once, staging_bytes=1 << 20)
        received = torch.tensor([report.bytes_received])
        dist.all_reduce(received)  # one rank of a node may receive all bytes for the node
        assert bool(received) == once
        loaded[once] = state
    _compare(loaded[True], loaded[False])
    _compare(loaded[True], edge_state(fill=True))


def _compare(one: dict[str, object], other: dict[str, object]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            _compare(value, other[name])  # type: ignore[arg-type]
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, other[name]), name  # type: ignore[arg-type]
        elif not isinstance(value, sw.PerRank):
            assert value == other[name], name


@pytest.mark.parametrize(
    ("world", "per_node"), mostly_long([(2, 1), (4, 1), (4, 2), (3, 2)], [(2, 1), (4, 2)])
)
def test_states_with_edges_equal_a_direct_load(
    gang: Gang, tmp_path: Path, world: int, per_node: int
) -> None:
    gang.run(load_edges, str(tmp_path / "edges"), per_node, world=world)


# Faults


def change_what_is_received() -> AbstractContextManager[object]:
    """Bytes change on the way from another node."""

    def publish(self: Any, read: int, checksum: int) -> None:
        if not self.is_read_here(read):
            self.slot(read)[100] ^= 1
        patched.temp_original(self, read, checksum)

    patched = patch("shardwise.parts.sharing.shared_buffers.SharedBuffers.publish", publish)
    return patched


def die_in_mid_load() -> AbstractContextManager[object]:
    """This rank is killed once it has read a few spans."""
    calls = iter(range(1000))

    def killing(*args: object, **options: object) -> object:
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return patched.temp_original(*args, **options)

    patched = patch(READ, killing)
    return patched


def fail_to_read() -> AbstractContextManager[object]:
    """The store of this rank fails after a few reads."""
    calls = iter(range(1000))
    read = ThrottledStore.open

    def failing(self: ThrottledStore, key: str) -> object:
        if next(calls) == 2:
            raise sw.StoreError("the store answered 503")
        return read(self, key)

    return patch.object(ThrottledStore, "open", failing)


def stop_reading() -> AbstractContextManager[object]:
    """This rank never ends a read in time."""
    return patch(READ, lambda *_, **__: time.sleep(6))


def refuse_connections() -> AbstractContextManager[object]:
    """This rank cannot connect to other nodes."""

    def refusing(*_: object, **__: object) -> object:
        raise ConnectionRefusedError("refused by the test")

    refusing_socket = SimpleNamespace(**{**vars(socket), "create_connection": refusing})
    return patch("shardwise.parts.sharing.links.socket", refusing_socket)


def plan_other_reads() -> AbstractContextManager[object]:
    """This rank divides the reads of nodes in another way."""

    def in_small_reads(*wanted: object, **options: object) -> object:
        return patched.temp_original(*wanted, **{**options, "largest_read": BLOCK})

    patched = patch("shardwise.parts.sharing.agreement.share_between_nodes", in_small_reads)
    return patched


def load_with_fault(path: str, per_node: int, fault: tuple[int, Fault], prefix: str) -> None:
    load_parts(path, whole, per_node, fault=fault, prefix=prefix)


@pytest.mark.parametrize("foreign", [False, True])
def test_what_other_nodes_pass_on_is_verified(
    gang: Gang, saved: str, tmp_path: Path, foreign: bool
) -> None:
    path = save_foreign(tmp_path / "tensors.pt") if foreign else saved
    fault = 1, change_what_is_received
    outcomes = gang.run_outcomes(
        load_with_fault, path, 1, fault, "model." if foreign else "", world=3
    )
    errors = [outcome.exception for outcome in outcomes]
    found = [str(error) for error in errors if isinstance(error, sw.CorruptionError)]
    assert found  # on rank 1, or on rank 2, to which it passed the bytes on
    assert all("passed them on" in each for each in found)
    assert all(isinstance(error, sw.RankError | sw.CorruptionError) for error in errors)
    gang.run(load_parts, saved, whole, world=3)


def test_nodes_that_plan_other_reads_fill_nothing_wrongly(gang: Gang, saved: str) -> None:
    outcomes = gang.run_outcomes(
        load_with_fault, saved, 1, (2, plan_other_reads), "", world=3, **PATIENT
    )
    errors = [str(outcome.exception) for outcome in outcomes]
    assert any("other reads than were planned" in each for each in errors), errors
    assert all(isinstance(outcome.exception, sw.RankError) for outcome in outcomes)


@pytest.mark.parametrize("per_node", mostly_long([1, 2], [2]))
def test_damage_is_an_error_on_every_rank(
    gang: Gang, saved: str, tmp_path: Path, per_node: int
) -> None:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in Path(saved).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = next(iter(sorted(copy.glob("r00002-*"))))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    start = time.monotonic()
    outcomes = gang.run_outcomes(load_parts, str(copy), whole, per_node, world=4, **PATIENT)
    assert time.monotonic() - start < SOON
    kinds = {type(outcome.exception).__name__ for outcome in outcomes}
    assert "CorruptionError" in kinds
    assert kinds <= {"CorruptionError", "RankError", "LostRankError"}
    assert all(
        victim.name in str(outcome.exception)
        for outcome in outcomes
        if not isinstance(outcome.exception, sw.LostRankError)
    )


@pytest.mark.parametrize("per_node", mostly_long([1, 2], [2]))
def test_a_rank_that_dies_is_noticed_on_all_nodes(gang: Gang, saved: str, per_node: int) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(
        load_with_fault, saved, per_node, (1, die_in_mid_load), "", world=4, group_timeout=4.0
    )
    assert time.monotonic() - start < SOON
    assert outcomes[1].kind == "died"
    for rank in (0, 2, 3):
        assert isinstance(outcomes[rank].exception, sw.RankError)
    gang.run(load_parts, saved, whole, world=2)


@pytest.mark.parametrize("per_node", mostly_long([1, 2], [2]))
def test_a_store_that_fails_on_one_rank_is_an_error_on_every_rank(
    gang: Gang, saved: str, per_node: int
) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(
        load_with_fault, saved, per_node, (2, fail_to_read), "", world=4, **PATIENT
    )
    assert time.monotonic() - start < SOON
    assert "503" in str(outcomes[2].exception)
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank].exception, sw.RankError)


def test_waiting_for_a_rank_of_another_node_ends(gang: Gang, saved: str) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(
        load_with_fault, saved, 1, (2, stop_reading), "", world=3, group_timeout=2.0
    )
    assert time.monotonic() - start < SOON
    errors = [outcome.exception for outcome in outcomes[:2]]
    assert all(isinstance(error, sw.RankError) for error in errors)
    assert any("2 s" in str(error) for error in errors)


def save_steps(root: str) -> None:
    box, state = state_of(rows)
    with sw.Checkpointer(root, memory=None) as checkpointer:
        for step in (1, 2):
            for i in range(TENSORS):
                _fragment(state, i).copy_(reference(i + step)[box.slices()])
            checkpointer.save(step, state)


def restore(root: str) -> tuple[int | None, int]:
    _, state = state_of(whole)
    with on_nodes(1), sw.Checkpointer(root, memory=None) as checkpointer:
        step = checkpointer.restore(state, read_once=True)
        assert checkpointer.last_restore is not None
        received = checkpointer.last_restore.load.bytes_received
    assert step is not None
    assert all(torch.equal(_fragment(state, i), reference(i + step)) for i in range(TENSORS))
    return step, received


def test_a_restore_goes_back_to_an_intact_checkpoint(gang: Gang, tmp_path: Path) -> None:
    root = tmp_path / "run"
    gang.run(save_steps, str(root), world=2)
    found = gang.run(restore, str(root), world=3)
    assert [step for step, _ in found] == [2] * 3
    assert all(received > 0 for _, received in found)
    victim = max(root.glob("*2/r00001-*"), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    found = gang.run(restore, str(root), world=3)
    assert [step for step, _ in found] == [1] * 3
    assert all(received > 0 for _, received in found)


def load_refused(path: str, once: bool | None) -> int:
    fault = 1, refuse_connections
    with patch("shardwise.parts.sharing.agreement.FEWEST_BYTES_SPARED", 1):
        return load_parts(path, whole, once=once, fault=fault)[2]


def test_nodes_that_cannot_connect_read_alone(gang: Gang, saved: str) -> None:
    with patch("shardwise.parts.sharing.agreement.CONNECT_SECONDS", 2.0):
        assert gang.run(load_refused, saved, None, world=2, group_timeout=3.0) == [0, 0]


def test_nodes_that_cannot_connect_fail_if_reading_once_is_required(gang: Gang, saved: str) -> None:
    outcomes = gang.run_outcomes(load_refused, saved, True, world=2, group_timeout=3.0)
    assert "cannot be reached" in str(outcomes[1].exception)
    assert isinstance(outcomes[0].exception, sw.RankError)
