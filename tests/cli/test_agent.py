"""`shardwise agent status`: what a node keeps, and how far it has come."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shardwise.manifest.manifest import FileEntry
from shardwise.memory.agent.keeper import attendance
from shardwise.memory.node import notes
from shardwise.memory.node.home import Home, new_run, write_note
from shardwise.memory.node.notes import Card, Done, Protect, Staged
from shardwise.memory.redundancy.placement import Member, place
from tests.cli.conftest import Run

SAVE = "0123456789abcdef"
OWN, OTHER = f"r00000-{SAVE}.safetensors", f"r00001-{SAVE}.safetensors"
STAGES = ("commit", "protect", "persist")


def written(path: Path, note: object, ago: float) -> None:
    """A note that was written so many seconds ago."""
    write_note(path, note)
    os.utime(path, (time.time() - ago,) * 2)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A node with three snapshots: all is done, one stage failed, and one is under way."""
    home = Home(tmp_path)
    write_note(home.card, Card("here-1", "http://127.0.0.1:1", "secret", 1, "rack-7"))
    run = home.run(new_run())
    run.free.mkdir(parents=True)
    (run.free / "r00000-aa.slot").write_bytes(bytes(500))
    for step, ago in ((1, 50.0), (2, 40.0), (3, 10.0)):
        there = run.step(step)
        there.mkdir()
        (there / OWN).write_bytes(bytes(1000 * step))
        entry = FileEntry(OWN, 0, 1000 * step, 0, 0, 0, 0)
        written(there / notes.staged(OWN), Staged(entry, "a.slot", 2, STAGES), ago)
    for step, stage, failure in (
        (1, "commit", ""),
        (1, "protect", ""),
        (1, "persist", ""),
        (2, "commit", ""),
        (2, "persist", "StoreError: full\x1b[31m"),
    ):
        done = Done(save_id=SAVE, stage=stage, failure=failure)
        written(run.step(step) / notes.outcome(stage, SAVE), done, 35.0)
    (run.step(1) / OTHER).write_bytes(bytes(700))
    members = [Member("here-1", "", ((OWN, 1000),)), Member("there-2", "", ((OTHER, 700),))]
    protection = place(members, SAVE, copies=1)
    wish = Protect(save_id=SAVE, protection=protection, nodes=[], wait=1.0)
    write_note(run.step(1) / notes.request("protect", SAVE), wish)
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
    assert (one["slots_used"], one["slots_free"], one["bytes_free"]) == (3, 1, 500)
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
    assert third["age"] == pytest.approx(10, abs=5)


def test_it_tells_what_would_be_lost(run: Run, home: Home) -> None:
    (one,) = run("agent", "status", "--dir", home.path.parent, "--json").document["runs"]
    found = {stage: (each["step"], each["steps"]) for stage, each in one["behind"].items()}
    assert found == {"commit": (2, 1), "protect": (1, 2), "persist": (1, 2)}
    assert one["behind"]["commit"]["seconds"] == pytest.approx(30, abs=1)


def test_an_agent_that_does_not_answer_is_told_of(run: Run, home: Home) -> None:
    with home.lock(), attendance(home):
        ran = run("agent", "status", "--dir", home.path.parent, "--json")
        assert (ran.document["alive"], ran.document["answers"]) == (True, False)
        assert ran.document["training"]
        ran = run("agent", "status", "--dir", home.path.parent)
        assert "lives, but does not answer" in ran.out


def test_it_speaks_to_people_too(run: Run, home: Home) -> None:
    ran = run("agent", "status", "--dir", home.path.parent)
    assert "no agent lives here" in ran.out
    assert "step 2: persist: StoreError: full\\x1b[31m" in ran.out
    assert "committed 2 (1 step, 30 s behind)" in ran.out
    assert "there-2" in ran.out
    assert "3 slots used, 1 free (500 B)" in ran.out


def test_a_damaged_note_hides_nothing_else(run: Run, home: Home) -> None:
    for note in home.path.rglob("*step-00000002/*.json"):
        note.write_text("{")
    (one,) = run("agent", "status", "--dir", home.path.parent, "--json").document["runs"]
    assert [each["step"] for each in one["snapshots"]] == [1, 2, 3]


def test_a_node_that_keeps_nothing(run: Run, tmp_path: Path) -> None:
    assert run("agent", "status", "--dir", tmp_path, "--json").document["runs"] == []
    assert "no agent lives here" in run("agent", "status", "--dir", tmp_path).out
