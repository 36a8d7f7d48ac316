"""Run commands of shardwise within this process, and make checkpoints for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.cli.app import app
from shardwise.testing import Gang
from tests.cli.states import save_sharded, save_steps


@dataclass(frozen=True, slots=True)
class Ran:
    """The output of a command, and its exit status."""

    out: str
    err: str
    status: int

    @property
    def document(self) -> Any:
        return json.loads(self.out, parse_constant=pytest.fail)


Run = Callable[..., Ran]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str | Path, typed: str | None = None) -> Ran:
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Ran(result.stdout, result.stderr, result.exit_code)

    return run


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
