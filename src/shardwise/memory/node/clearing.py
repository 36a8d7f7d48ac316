"""Memory that a user wants back: what a node keeps of each run, and its removal."""

from __future__ import annotations

import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory.home import ROOT, Home, Place, Run, hold, read_record
from shardwise.memory.node.retire import discard_newer
from shardwise.memory.node.vacancies import ASIDE
from shardwise.memory.ranks import has_trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What a node keeps of a run.

    Attributes:
        run: its id.
        root: where the run saves its checkpoints; None if that is not known.
        bytes: of all files, free slots included.
        steps: of its snapshots, ascending.
        persisted: the newest of them that is in storage too; None if none is.
        training: whether a trainer of the run lives on the node.
    """

    run: str
    root: str | None
    bytes: int
    steps: list[int]
    persisted: int | None
    training: bool


def kept_run(run: Run) -> KeptRun:
    """What a node keeps of a run."""
    root: str | None = None
    with suppress(StoreError):
        root = read_record(run.path / ROOT, str)
    steps = run.steps()
    return KeptRun(
        run=run.name,
        root=root,
        bytes=sum(map(_size, run.path.rglob("*"))),
        steps=steps,
        persisted=max((step for step in steps if _is_persisted(Place(run, step))), default=None),
        training=has_trainers(run),
    )


def clear_run(home: Home, run: Run, *, force: bool) -> None:
    """Remove all that a node keeps of a run.

    Args:
        force: also if a trainer of the run lives on the node.

    Raises:
        StoreError: a trainer lives, or the agent does not stop working on a snapshot.
    """
    _refuse_trainers(run, force)
    discard_newer(run, None)
    aside = home.path / f"{ASIDE}{secrets.token_hex(4)}"
    with hold(run.path, shared=False) as alone:
        _refuse_trainers(run, force)
        if not alone:
            if not run.path.exists():
                return
            raise StoreError(f"run {run.name}: a trainer starts just now: nothing more is removed")
        run.path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _refuse_trainers(run: Run, force: bool) -> None:
    if not force and has_trainers(run):
        raise StoreError(
            f"run {run.name} has a trainer on this node, which would lose its snapshots: end the "
            "training first, or pass --force"
        )


def _is_persisted(place: Place) -> bool:
    ended = [place.ended("persist", save_id) for save_id in place.saves()]
    return any(done is not None and not done.failure for done in ended)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size if path.is_file() else 0
    return 0
