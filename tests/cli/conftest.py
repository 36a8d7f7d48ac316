"""Run commands of shardwise within this process, and make checkpoints for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.states import save_sharded, save_steps
from tests.commands import Ran as Ran
from tests.commands import Run as Run
from tests.commands import run_command
from tests.tools.gang import Gang


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    return run_command


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root of a run with three steps."""
    root = tmp_path / "run"
    save_steps(root, 100, 200, 300)
    return root


@pytest.fixture(scope="session")
def sharded(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of four ranks. Tests must only read it."""
    place = tmp_path_factory.mktemp("sharded") / "checkpoint"
    gang.run(save_sharded, place, world=4)
    return place
