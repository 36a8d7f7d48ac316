"""`shardwise agent status`: what a node keeps, and how far it has come."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

import shardwise as sw
from shardwise.kernel.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.parts.cli.agent_tables import show_runs, show_status
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.home import Run as MemoryRun
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import (
    AgentInfo,
    PendingManifest,
    RankPart,
    Retry,
    SaveState,
    StageOutcome,
)
from shardwise.parts.memory.states import read_state
from shardwise.parts.tiers.options import StorageTask
from tests.cli.conftest import Run

SAVE = "0123456789abcdef"
OWN, OTHER = f"r00000-{SAVE}.safetensors", f"r00001-{SAVE}.safetensors"
STAGES = ("commit", "protect", "persist")


def place_of(run: MemoryRun, step: int) -> SnapshotDirectory:
    """The snapshot of a step."""
    return SnapshotDirectory(run, step, SAVE)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A node with three snapshots: all is done, one stage failed, and one is under way."""
    home = Home(tmp_path)
    write_record(home.info_path, AgentInfo("here-1", "http://127.0.0.1:1", "secret", 1, "rack-7"))
    run = home.run(new_run_id())
    run.free_directory.mkdir(parents=True)
    (run.free_directory / "rank-00000-aa").write_bytes(bytes(8192))
    now = time.time()
    outcomes: dict[int, dict[str, str]] = {
        1: {"commit": "", "protect": "", "persist": ""},
        2: {"commit": "", "persist": "StoreError: full\x1b[31m"},
        3: {},
    }
    retry = Retry(failure="no answer", since=now - 30, attempts=4)
    for step, ago in ((1, 50.0), (2, 40.0), (3, 10.0)):
        there = place_of(run, step).path
        there.mkdir()
        entry = FileEntry(OWN, 0, 1000 * step, 0, 0, 0, 0)
        part = RankPart(file=entry, snapshots_to_keep=2, stages=STAGES, epoch=0)
        write_record(there / records.rank_record(0), part)
        (there / OWN).write_bytes(bytes(1000 * step))
        os.utime(there / OWN, (now - ago,) * 2)
        ended = {
            stage: StageOutcome(failure=failure, ended_at=now - 35.0)
            for stage, failure in outcomes[step].items()
        }
        retries = {"persist": retry} if step == 3 else {}
        write_record(there / records.STATE, SaveState(outcomes=ended, retries=retries))
    (place_of(run, 1).path / OTHER).write_bytes(bytes(700))
    pending = PendingManifest(
        save_id=SAVE,
        step=1,
        manifest="",
        files=[(OWN, "here-1"), (OTHER, "there-2")],
        nodes=[AgentInfo(node, "http://127.0.0.1:1", "secret") for node in ("here-1", "there-2")],
        leader="there-2",
        storage=StorageTask(root="/root"),
        copies=1,
    )
    write_record(place_of(run, 1).path / records.PENDING, pending)
    manifest = Manifest(
        save_id=SAVE,
        step=1,
        created="now",
        world_size=2,
        files=(FileEntry(OWN, 0, 1000, 0, 0, 0, 0), FileEntry(OTHER, 1, 700, 0, 0, 0, 0)),
        objects=(),
        tensors=msgspec.Raw(b"[]"),
    )
    write_record(place_of(run, 1).manifest_path, encode_manifest(manifest))
    return home


def test_all_that_is_known_is_told(run: Run, home: Home) -> None:
    ran = run("agent", "status", "--dir", home.path.parent, "--json")
    assert ran.status == 0
    assert "secret" not in ran.out
    shown = ran.document
    known = {name: shown[name] for name in ("node", "domain", "alive", "answers", "training")}
    assert known == {
        "node": "here-1",
        "domain": "rack-7",
        "alive": False,
        "answers": None,
        "training": False,
    }
    assert shown["bytes"] > 6700
    assert shown["bytes_left"] > 0
    (one,) = shown["runs"]
    assert (one["slots_used"], one["slots_free"], one["bytes_free"]) == (3, 1, 8192)
    first, second, third = one["snapshots"]
    assert [(each["step"], each["bytes"]) for each in one["snapshots"]] == [
        (1, 1000),
        (2, 2000),
        (3, 3000),
    ]
    assert (first["bytes_for_others"], first["protected_by"]) == (700, ["there-2"])
    assert [first[stage]["state"] for stage in STAGES] == ["done"] * 3
    assert first["commit"]["seconds"] == pytest.approx(15, abs=2)
    assert [second[stage]["state"] for stage in STAGES] == ["done", "under way", "failed"]
    assert second["persist"]["failure"].startswith("StoreError: full")
    assert [third[stage]["state"] for stage in STAGES] == ["under way"] * 3
    retried = third["persist"]["failure"]
    assert retried.startswith("failed 4 times in 3")
    assert retried.endswith(" s, the agent tries again: no answer")
    assert third["age"] == pytest.approx(10, abs=5)


def test_it_tells_what_would_be_lost(run: Run, home: Home) -> None:
    (one,) = run("agent", "status", "--dir", home.path.parent, "--json").document["runs"]
    found = {stage: (each["step"], each["steps"]) for stage, each in one["lag"].items()}
    assert found == {"commit": (2, 1), "protect": (1, 2), "persist": (1, 2)}
    assert one["lag"]["commit"]["seconds"] == pytest.approx(30, abs=1)


def test_an_agent_that_does_not_answer_is_told_of(run: Run, home: Home) -> None:
    rank = RankLock(home.runs()[0], 0)
    with home.lock("agent.lock"):
        ran = run("agent", "status", "--dir", home.path.parent, "--json")
        assert (ran.document["alive"], ran.document["answers"]) == (True, False)
        assert ran.document["training"]
        ran = run("agent", "status", "--dir", home.path.parent)
        assert "runs, but does not answer" in ran.out
    rank.release()


def test_it_speaks_to_people_too(run: Run, home: Home) -> None:
    ran = run("agent", "status", "--dir", home.path.parent)
    assert "not running" in ran.out
    assert "step 2: persist: StoreError: full\\x1b[31m" in ran.out
    assert "committed 2 (1 step, 30.0 s behind)" in ran.out
    assert "step 3: persist: failed 4 times" in ran.out
    assert "there-2" in ran.out
    assert "3 slots used, 1 free (8.00 KiB)" in ran.out


def test_a_snapshot_without_copies_or_parity_is_not_called_protected(run: Run, home: Home) -> None:
    """The stage "protect" of a run on one node is done at once, and protects nothing."""
    place = place_of(home.runs()[0], 1)
    (place.path / records.PENDING).unlink()
    status = ["agent", "status", "--dir", home.path.parent]

    def shown_of_step_1() -> str:
        lines = run(*status).out.splitlines()
        return next(line.rstrip() for line in lines if line.split()[:1] == ["1"])

    assert shown_of_step_1().endswith("storage")
    state = read_state(place)
    left = {stage: done for stage, done in state.outcomes.items() if stage != "persist"}
    write_record(place.path / records.STATE, msgspec.structs.replace(state, outcomes=left))
    assert shown_of_step_1().endswith("nothing")
    (one,) = run(*status, "--json").document["runs"]
    assert one["snapshots"][0]["protect"] == {"state": "", "seconds": None, "failure": ""}
    assert one["lag"]["protect"]["step"] is None
    assert "none protected" in run(*status).out


def test_a_damaged_note_hides_nothing_else(run: Run, home: Home) -> None:
    for note in home.path.rglob("*step-00000002/*.json"):
        note.write_text("{")
    (one,) = run("agent", "status", "--dir", home.path.parent, "--json").document["runs"]
    assert [each["step"] for each in one["snapshots"]] == [1, 2, 3]


def test_a_node_that_keeps_nothing(run: Run, tmp_path: Path) -> None:
    assert run("agent", "status", "--dir", tmp_path, "--json").document["runs"] == []
    assert "no agent runs here" in run("agent", "status", "--dir", tmp_path).out


def test_tables_fit_80_columns(home: Home) -> None:
    console = Console(file=io.StringIO(), width=80, markup=False)
    node = sw.NodeAgent(home.path.parent)
    show_status(node.status(), console)
    show_runs(str(home), node.runs(), False, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown.replace("1…3", "")
    assert "[bold" not in shown  # no markup that is not meant to be seen
    for words in ("committed", "protected", "persisted", "protected by", "not 3"):
        assert words in shown
