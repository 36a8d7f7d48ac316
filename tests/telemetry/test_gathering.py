"""What ranks record, and how rank 0 gathers and stores it: with ranks as threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.kernel.events import Event, OperationRecord
from shardwise.kernel.manifest.manifest import telemetry_file
from shardwise.kernel.store import LocalStore, Store
from shardwise.parts.telemetry import files
from shardwise.parts.telemetry.encoding import encode
from shardwise.parts.telemetry.hook import MOST_WAITING, TelemetryHook
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.telemetry.rows import (
    Operation,
    align,
    combine_messages,
    decode_message,
    row_of,
)
from shardwise.parts.telemetry.storing import KEPT_TABLES, TelemetryWriter, describe, summarize
from shardwise.ports.hooks import RestoreReport, Run
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch
from tests.memory_store import MemoryStore, Server
from tests.tools.waiting import wait_until
from tests.tools.wrapped_store import WrappedStore

WORLD = 5
SAVE = Operation(name="save", id="ab" * 8, step=3, path="/run/step-00000003")


def record_of(rank: int, *, late: float = 0.0, clock_off: float = 0.0) -> OperationRecord:
    """A save in which all ranks agree at 100 s, and rank 2 writes longest."""
    writes = 3.0 if rank == 2 else 1.0
    return OperationRecord(
        began=99.0 + late,
        ended=104.0,
        agreed=100.0,
        clock=1e9 + clock_off,
        events=(
            Event("describe", 99.0 + late, 1.0 - late, waited=0.5),
            Event("write", 100.5, 3.0, 1000 + rank, 3.0 - writes, rank, f"r0000{rank}.safetensors"),
        ),
        axes={"dp": rank // 2, "tp": rank % 2},
        save_id="ab" * 8,
    )


def rows(**changes: Callable[[int], float]) -> list[Telemetry]:
    return [
        row_of(
            SAVE,
            record_of(rank, **{name: change(rank) for name, change in changes.items()}),
            rank,
            WORLD,
            f"host-{rank // 2}",
        )
        for rank in range(WORLD)
    ]


def gathered(tables: list[Telemetry]) -> Telemetry:
    (table,) = decode_message(combine_messages([encode(each) for each in tables]), "here")
    return align(table)


def test_the_rows_of_ranks_become_columns() -> None:
    table = gathered(rows())
    assert (table.operation, table.step, table.world_size) == ("save", 3, WORLD)
    assert table.started == "2001-09-09T01:46:39+00:00"
    assert table.seconds == 5.0
    assert table.ranks.tolist() == [0, 1, 2, 3, 4]
    assert [table.hosts[each] for each in table.host] == ["host-0"] * 2 + ["host-1"] * 2 + [
        "host-2"
    ]
    assert (table.axes, table.coordinates.tolist()) == (
        ("dp", "tp"),
        [[0, 0, 1, 1, 2], [0, 1, 0, 1, 0]],
    )
    describe, write = table.stages
    assert (describe.name, describe.start.tolist()) == ("describe", [0] * 5)
    assert (write.name, write.start.tolist()) == ("write", [1_500_000] * 5)
    assert write.duration.tolist() == [3_000_000] * 5
    assert write.waited.tolist() == [2_000_000, 2_000_000, 0, 2_000_000, 2_000_000]
    assert (write.bytes.tolist(), write.retries.tolist()) == (
        [1000, 1001, 1002, 1003, 1004],
        [*range(5)],
    )
    assert write.file.tolist()[4] == b"r00004.safetensors"


def test_a_rank_that_came_late_is_seen() -> None:
    table = gathered(rows(late=lambda rank: 0.25 * (rank == 3)))
    assert table.began.tolist() == [0, 0, 0, 250_000, 0]
    assert table.stages[0].start.tolist() == [0, 0, 0, 250_000, 0]
    assert table.stages[1].start.tolist() == [1_500_000] * 5


def test_clocks_that_are_off_do_not_move_the_stages() -> None:
    table = gathered(rows(clock_off=lambda rank: -7.5 * rank))
    assert table.clock.tolist() == [0, -7_500_000, -15_000_000, -22_500_000, -30_000_000]
    assert table.stages[1].start.tolist() == [1_500_000] * 5


def test_large_messages_are_combined_by_rank_0_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.parts.telemetry.rows.LARGEST_COMBINED", 100)
    parts = [encode(each) for each in rows()]
    message = combine_messages([combine_messages(parts[:2]), combine_messages(parts[2:])])
    assert message.count(b"\n") == 4
    (table,) = decode_message(message, "here")
    assert table.ranks.tolist() == [0, 1, 2, 3, 4]


def test_a_damaged_message_reaches_rank_0_as_it_is() -> None:
    assert combine_messages([b"{", b""]) == b"{"


def test_a_stage_that_ran_twice_is_one_row() -> None:
    events = (Event("read", 1.0, 2.0, 5, retries=1), Event("read", 4.0, 1.0, 7, retries=2))
    table = row_of(SAVE, OperationRecord(began=0.5, ended=6.0, events=events), 0, 1, "a,b")
    (read,) = table.stages
    assert (read.start.tolist(), read.duration.tolist()) == ([500_000], [3_000_000])
    assert (read.bytes.tolist(), read.retries.tolist()) == ([12], [3])
    assert table.hosts == ("a-b",)


def report_of(rank: int, step: int = 3, **changes: float) -> sw.SaveReport:
    record = record_of(rank, **changes)
    return sw.SaveReport(
        path=f"/run/step-{step:08d}", step=step, bytes_total=0, bytes_written=0,
        bytes_deduplicated=0, files=1, plan_cached=False, bytes_communicated=0, seconds={},
        record=record,
    )  # fmt: skip


def hook_of(
    group: ThreadGroup,
    root: Store,
    take_ended: Callable[[], dict[str, tuple[Event, ...]]] | None = None,
) -> TelemetryHook:
    run = Run(root, group.rank, group.size)
    return TelemetryHook(run, group, take_ended, f"host-{group.rank // 2}")


@pytest.fixture(params=["local", "object store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    store: Store = LocalStore(tmp_path) if request.param == "local" else MemoryStore(Server())
    store.at("step-00000003").publish("manifest.json", b"{}", replace=True)
    return store


def test_a_save_is_stored_beside_its_checkpoint(root: Store) -> None:
    def train(group: ThreadGroup) -> None:
        hook = hook_of(group, root)
        hook.staged(report_of(group.rank), durable=True)
        hook.closed(completed=True)

    run_ranks(WORLD, train)
    found = files.read_file(root.at("step-00000003"), telemetry_file("ab" * 8))
    assert found is not None
    assert found.ranks.tolist() == [0, 1, 2, 3, 4]
    assert found.stages[1].waited.tolist() == [2_000_000, 2_000_000, 0, 2_000_000, 2_000_000]


def test_a_save_of_agents_is_stored_when_all_ranks_know_that_it_has_ended(root: Store) -> None:
    """Here, the odd ranks learn of it a save later."""

    def train(group: ThreadGroup) -> None:
        ended = [{}, {}, {"ab" * 8: (Event("persist", 104.0, 2.0, 77),)}, {}]
        if group.rank % 2:
            ended = [{}, *ended]
        hook = hook_of(group, root, lambda: ended.pop(0))
        for step in (3, 4, 5, 6):
            hook.begun(step)
            hook.staged(
                report_of(group.rank, step) if step == 3 else other_of(group.rank, step),
                durable=True,
            )

        hook.closed(completed=False)
        if group.rank == 0:
            wait_until(lambda: complete(root))

    def other_of(rank: int, step: int) -> sw.SaveReport:
        report = report_of(rank, step)
        object.__setattr__(report, "record", OperationRecord(save_id=f"{step:016x}"))
        return report

    run_ranks(WORLD, train)
    found = files.read_file(root.at("step-00000003"), telemetry_file("ab" * 8))
    assert found is not None
    persist = found.stage("persist")
    assert persist is not None
    assert persist.start.tolist() == [5_000_000] * WORLD
    assert persist.bytes.tolist() == [77] * WORLD
    assert root.at("step-00000004").list() == []  # it has not ended


def test_a_save_does_not_wait_for_its_agents_forever(root: Store) -> None:
    """The 64 newest saves wait. The ranks' own stages of older ones are stored."""
    root.at("step-00000004").publish("manifest.json", b"{}", replace=True)

    def train(group: ThreadGroup) -> None:
        hook = hook_of(group, root, dict)
        for step in range(3, 3 + MOST_WAITING + 2):
            hook.begun(step)
            record = replace(record_of(0), save_id=f"{step:016x}")
            hook.staged(replace(report_of(0, step), record=record), durable=True)
        hook.closed(completed=False)
        wait_until(lambda: len(root.at("step-00000003").list()) == 2)

    run_ranks(1, train)
    found = files.read_file(root.at("step-00000003"), telemetry_file(f"{3:016x}"))
    assert found is not None
    assert [each.name for each in found.stages] == ["describe", "write"]
    assert root.at("step-00000004").list() == ["manifest.json"]


def test_the_end_of_a_run_sends_saves_that_wait_for_their_agents(root: Store) -> None:
    def train(group: ThreadGroup) -> None:
        hook = hook_of(group, root, dict)
        hook.staged(report_of(group.rank), durable=True)
        hook.closed(completed=True)

    run_ranks(2, train)
    assert len(root.at("step-00000003").list()) == 2


def test_a_snapshot_does_not_wait_for_slower_copies(root: Store) -> None:
    returned = threading.Event()

    def train(group: ThreadGroup) -> None:
        hook = hook_of(group, root, dict)
        hook.begun(3)
        if group.rank == 1:
            assert returned.wait(20.0)
        hook.staged(report_of(group.rank), durable=True)
        if group.rank == 0:
            returned.set()
        hook.closed(completed=True)

    run_ranks(2, train)
    assert len(root.at("step-00000003").list()) == 2


def complete(root: Store) -> bool:
    found = files.read_file(root.at("step-00000003"), telemetry_file("ab" * 8))
    return found is not None and len(found.ranks) == WORLD


def test_a_restore_is_stored_in_the_root(root: Store) -> None:
    def train(group: ThreadGroup) -> None:
        load = sw.LoadReport(
            path=f"/memory/{group.rank}", step=3, bytes_needed=1, bytes_read=1, bytes_received=0,
            files=1, missing=(), unexpected=(), optimizers=(), seconds={},
        )  # fmt: skip
        report = RestoreReport(
            3,
            "memory",
            load,
            (),
            {},
            {"asking": 0.5, "reading": 1.0, "total": 2.0},
            record=record_of(group.rank),
        )
        hook = hook_of(group, root)
        hook.restored(report)
        hook.closed(completed=True)

    run_ranks(WORLD, train)
    (name,) = files.list_operations(root)
    assert name.startswith("restore-20010909T014639Z-")
    found = files.read_file(root.at(files.DIRECTORY), name)
    assert found is not None
    assert (found.operation, found.step) == ("restore", 3)
    assert found.phases == {"asking": 0.5, "reading": 1.0}
    assert found.ranks.tolist() == [0, 1, 2, 3, 4]


def test_few_snapshots_are_stored(tmp_path: Path) -> None:
    """One a minute, with all its ranks, although rank 1 sends its record 20 s later."""
    seconds = [0.0]
    store = LocalStore(tmp_path)
    writer = TelemetryWriter(store, lambda: seconds[0])
    for number in range(10):
        operation = Operation(name="snapshot", id=f"{number:016x}", step=number, path="/memory")
        for rank in range(2):
            seconds[0] = 25.0 * number + 20.0 * rank
            writer._add_message(encode(row_of(operation, record_of(0), rank, 2, "a")))
    tables = [
        files.read_file(store.at(files.DIRECTORY), name) for name in files.list_operations(store)
    ]
    stored = [(each.step, each.ranks.tolist()) for each in tables if each is not None]
    assert stored == [(step, [0, 1]) for step in (0, 2, 5, 8)]


def test_of_very_many_incomplete_tables_the_oldest_is_forgotten(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = TelemetryWriter(store)
    for number, rank in [*((each, 0) for each in range(KEPT_TABLES + 1)), (1, 1), (0, 1)]:
        operation = Operation(name="restore", id=f"{number:016x}", step=number, path="/run")
        writer._add_message(encode(row_of(operation, record_of(0), rank, 2, "a")))
    tables = [
        files.read_file(store.at(files.DIRECTORY), name) for name in files.list_operations(store)
    ]
    ranks = {each.step: each.ranks.tolist() for each in tables if each is not None}
    assert (ranks[0], ranks[1], ranks[2]) == ([1], [0, 1], [0])


def test_a_removed_checkpoint_does_not_come_back(tmp_path: Path) -> None:
    writer = TelemetryWriter(LocalStore(tmp_path))
    writer._add_message(encode(row_of(SAVE, record_of(0), 0, 1, "a")))
    assert not (tmp_path / "step-00000003").exists() or not list(
        (tmp_path / "step-00000003").iterdir()
    )


def test_a_checkpoint_that_is_removed_meanwhile_does_not_come_back(root: Store) -> None:
    class RemovedMeanwhile(WrappedStore):
        def at(self, name: str) -> RemovedMeanwhile:
            return RemovedMeanwhile(self.store.at(name))

        def run(self, operation: str, path: str, act: Any) -> Any:
            if operation == "publish":
                self.store.delete("manifest.json")
            return act()

    writer = TelemetryWriter(RemovedMeanwhile(root))
    writer._add_message(encode(row_of(SAVE, record_of(0), 0, 1, "a")))
    assert root.at("step-00000003").list() == []


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def test_clocks_that_are_off_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TelemetryWriter(LocalStore(tmp_path))
    tables = rows(clock_off=lambda rank: [0.0, 4.9, -5.1, 3600.0, 0.0][rank])
    for step in (3, 4):
        for table in tables:
            writer._add_message(encode(table).replace(b'"ab', b'"%02x' % step))
    (warning, other) = warnings_of(caplog)
    assert "clocks differ from that of rank 0: rank 2 on host-1 by -5.1 s. " in warning
    assert "rank 3 on host-1 by +3600.0 s" in other


@pytest.mark.long
def test_a_warning_of_many_clocks_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = 5000
    tables = [
        row_of(SAVE, record_of(0, clock_off=60.0 * (rank > 0)), rank, ranks, f"host-{rank}")
        for rank in range(ranks)
    ]
    TelemetryWriter(LocalStore(tmp_path))._add_message(b"\n".join(map(encode, tables)))
    (warning,) = warnings_of(caplog)
    assert ", and 4994 more" in warning
    assert len(warning) < 600


def test_a_rank_that_fails_during_the_gathering_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(group: ThreadGroup) -> str:
        hook = hook_of(group, LocalStore(tmp_path))
        if group.rank == 3:
            raise RuntimeError("killed")
        hook.staged(report_of(group.rank), durable=True)
        hook.staged(report_of(group.rank), durable=True)  # nothing more is exchanged
        hook.closed(completed=True)
        return "trained on"

    outcomes = run_ranks_and_catch(WORLD, train)
    assert [str(each) for each in outcomes] == ["trained on"] * 3 + ["killed", "trained on"]
    assert (
        sum("the telemetry of the last operations is lost" in each for each in warnings_of(caplog))
        == 4
    )


def test_a_rank_without_telemetry_does_not_stop_the_others(root: Store) -> None:
    def train(group: ThreadGroup) -> None:
        hook = hook_of(group, root)
        record = record_of(group.rank)
        if group.rank == 1:
            record = OperationRecord(events=(Event("write", 0.0, 1e300),), save_id="ab" * 8)
        report = report_of(group.rank)
        object.__setattr__(report, "record", record)
        hook.staged(report, durable=True)
        hook.closed(completed=True)

    run_ranks(WORLD, train)
    found = files.read_file(root.at("step-00000003"), telemetry_file("ab" * 8))
    assert found is not None
    assert found.ranks.tolist() == [0, 2, 3, 4]


def test_a_line_names_the_slowest_rank() -> None:
    table = gathered(rows())
    line = "save of step 3: 5.00 s on 5 ranks; longest in write: rank 2 on host-1, 3.00 s"
    assert describe(table) == f"{line} (0.98 KiB)"
    assert summarize(table)["stages"] == {
        "describe": {"seconds": 0.5, "slowest_rank": 0},
        "write": {"seconds": 3.0, "slowest_rank": 2},
    }


def test_waits_count_neither_in_the_line_nor_in_the_numbers() -> None:
    """A rank waited longer than its stage took, by a rounding error: it did not work at all."""
    table = gathered(rows())
    write = table.stages[1]
    waiting = replace(write, name="sync", waited=write.duration + 1)
    table = replace(table, stages=(waiting, write))
    assert "longest in write: rank 2 on host-1, 3.00 s" in describe(table)
    stages: Any = summarize(table)["stages"]
    assert stages["sync"] == {"seconds": 0.0, "slowest_rank": 0}


def test_bytes_of_a_save_through_memory_count_once() -> None:
    """Two ranks of a host copy 4,050 bytes each. Both have the agent's 8,100 bytes."""
    record = OperationRecord(
        began=0.0,
        ended=3.0,
        events=(
            Event("copy", 0.0, 1.0, 4_050, retries=1),
            Event("commit", 1.0, 0.5, 0),
            Event("persist", 2.0, 1.0, 8_100, retries=3),
        ),
        save_id="ab" * 8,
    )
    table = gathered([row_of(SAVE, record, rank, 2, "host-0") for rank in range(2)])
    assert (summarize(table)["bytes"], summarize(table)["retries"]) == (8_100, 5)
