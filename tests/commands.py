"""Run commands of shardwise within this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from shardwise.parts.cli.app import app as app


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


def run_command(*args: object, typed: str | None = None) -> Ran:
    """Run a command, with `typed` on stdin."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.stdout, result.stderr, result.exit_code)
