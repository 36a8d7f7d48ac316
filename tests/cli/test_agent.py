"""`shardwise agent status`: what a node keeps, and how far it has come."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.memory import notes
from shardwise.memory.home import Home, new_run, write_note
from shardwise.memory.notes import Card, Done
from tests.cli.conftest import Run

SAVE = "0123456789abcdef"


def node(directory: Path) -> Home:
    """A node that keeps two snapshots: one that failed to persist, one under way."""
    home = Home(directory)
    write_note(home.card, Card("here-1", "http://127.0.0.1:1", "secret", 1))
    run = home.run(new_run())
    for step in (1, 2):
        run.step(step).mkdir(parents=True)
        (run.step(step) / f"r00000-{SAVE}.safetensors").write_bytes(bytes(1000 * step))
    for stage, failure in (("commit", ""), ("persist", "StoreError: full")):
        done = Done(save_id=SAVE, stage=stage, failure=failure)
        write_note(run.step(1) / notes.outcome(stage, SAVE), done)
    return home


def test_it_shows_what_is_kept(run: Run, tmp_path: Path) -> None:
    home = node(tmp_path)
    ran = run("agent", "status", "--dir", tmp_path, "--json")
    assert ran.status == 0
    shown = json.loads(ran.out)
    assert (shown["node"], shown["alive"]) == ("here-1", False)
    first, second = shown["snapshots"]
    assert (first["step"], first["bytes"]) == (1, 1000)
    assert (first["commit"], first["persist"]) == ("done", "StoreError: full")
    assert (second["commit"], second["persist"]) == ("under way", "")
    assert "secret" not in ran.out
    with home.lock():
        assert json.loads(run("agent", "status", "--dir", tmp_path, "--json").out)["alive"]


def test_it_speaks_to_people_too(run: Run, tmp_path: Path) -> None:
    node(tmp_path)
    ran = run("agent", "status", "--dir", tmp_path)
    assert "no agent lives here" in ran.out
    assert "StoreError: full" in ran.out
