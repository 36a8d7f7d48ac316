"""What fails on one rank fails on all, at once and before it costs anything, and says where."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.tools.gang import Gang


class Loader:
    """Fails to load on one rank."""

    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("boom")


def raising(name: str) -> str:
    if dist.get_rank() == 1:
        raise LookupError(name)
    return name


def mine(value: Any, other: Any) -> Any:
    """One thing on rank 1, another elsewhere."""
    return value if dist.get_rank() == 1 else other


def state() -> dict[str, Any]:
    return {"x": torch.ones(3)}


def save_with(path: str, name: str) -> None:
    options = {
        "staging_bytes": {"staging_bytes": mine(0, 1 << 20)},
        "metrics": {"metrics": mine({"loss": "low"}, None)},
        "overwrite": {"overwrite": mine(True, False)},
        "place": {},
    }[name]
    sw.save(mine("s3://bucket", path) if name == "place" else path, state(), **options)


def load_with(path: str, name: str) -> None:
    options = {
        "staging_bytes": {"staging_bytes": mine(0, 1 << 20)},
        "strict": {"strict": mine(True, False)},
        "rename": {"rename": raising},
        "only": {"only": mine("x", ["x"])},
        "place": {},
        "absent place": {},
    }[name]
    other = {"place": f"{path}-2", "absent place": f"{path}-3"}.get(name, path)
    sw.load(mine(other, path), state(), **options)


def restore_with(path: str, name: str) -> None:
    with sw.Checkpointer(path, memory=None) as checkpointer:
        if name == "close":
            checkpointer.close()
        step = mine(2, 1) if name == "step" else "newest"
        checkpointer.restore({"x": torch.zeros(3), "loader": Loader()}, step=step)


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with two steps, and two checkpoints beside it."""
    path = str(tmp_path_factory.mktemp("saved") / "c")
    for each in (path, f"{path}-2"):
        sw.save(each, state())
    with sw.Checkpointer(f"{path}-root", memory=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"x": torch.ones(3), "loader": {"at": 1}})
    return path


def check(gang: Gang, function: Any, path: str, name: str) -> list[str]:
    """Both ranks raise within seconds; what they said."""
    start = time.monotonic()
    outcomes = gang.run_outcomes(function, path, name, world=2, timeout=60.0, group_timeout=60.0)
    assert time.monotonic() - start < 40
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert not any(isinstance(outcome.exception, sw.LostRankError) for outcome in outcomes)
    return [str(outcome.exception) for outcome in outcomes]


@pytest.mark.parametrize("name", ["staging_bytes", "metrics", "overwrite", "place"])
def test_saving(gang: Gang, tmp_path: Path, name: str) -> None:
    said = check(gang, save_with, str(tmp_path / "c"), name)
    assert "rank 1" in said[0]
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(
    "name", ["staging_bytes", "strict", "rename", "only", "place", "absent place"]
)
def test_loading(gang: Gang, saved: str, name: str) -> None:
    assert "rank 1" in check(gang, load_with, saved, name)[0]


@pytest.mark.parametrize("name", ["loader", "step", "close"])
def test_restoring(gang: Gang, saved: str, name: str) -> None:
    said = check(gang, restore_with, f"{saved}-root", name)
    assert {"loader": "loader", "step": "step=2", "close": "closed"}[name] in said[0]


def leave_out(path: str) -> str:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        sw.save(path, state(), group=group)
        return ""
    with pytest.raises(sw.StateError) as caught:
        sw.save(path, state(), group=group)
    return str(caught.value)


def test_a_rank_outside_of_the_group_is_told(gang: Gang, tmp_path: Path) -> None:
    assert "not in the process group" in gang.run(leave_out, str(tmp_path), world=2)[1]
