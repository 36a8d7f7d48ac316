"""Saved under each parallelism of torch, loaded under each other, equal to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing import Gang
from tests.multirank.models import WORLDS, build, train


def save_trained(kind: str, path: str) -> None:
    """Train for two steps under a parallelism, and save."""
    state = build(kind, 1)
    train(state)
    sw.save(path, state, check_replicas=True)


def load_and_save(kind: str, source: str, target: str) -> None:
    """Load into a run of another parallelism that has not stepped, and save it again."""
    state = build(kind, 2)
    sw.load(source, state)
    assert state["step"] == 1
    sw.save(target, state, check_replicas=True)


def contents(path: str) -> dict[str, object]:
    """Every name of a checkpoint: the bytes of tensors, and plain values."""
    checkpoint = sw.open(path)
    return {
        name: value[...].contiguous().view(torch.uint8).tolist()
        if value.shape
        else value[...].item()
        for name, value in checkpoint.tensors().items()
    } | {name: _ungrouped(checkpoint[name]) for name in checkpoint if _is_plain(checkpoint, name)}


def _is_plain(checkpoint: sw.Checkpoint, name: str) -> bool:
    return name not in checkpoint.tensors()


def _ungrouped(value: object) -> object:
    """Param groups as the settings of each member, for groups are joined in no stated order."""
    if not isinstance(value, list):
        return value
    return {member: group["value"] for group in value for member in group["members"]}


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A checkpoint of each parallelism."""
    root = tmp_path_factory.mktemp("matrix")
    for kind, world in WORLDS.items():
        gang.run(save_trained, kind, str(root / kind), world=world)
    return {kind: str(root / kind) for kind in WORLDS}


@pytest.mark.parametrize("source", WORLDS)
def test_it_loads_under_every_other(
    gang: Gang, saved: dict[str, str], tmp_path: Path, source: str
) -> None:
    expected = contents(saved[source])
    assert any(name.endswith(".exp_avg") for name in expected)
    for kind, world in WORLDS.items():
        target = str(tmp_path / kind)
        if kind == "fsdp1_flat" and source != "fsdp1_flat":
            continue  # a flat parameter is in one group: see test_groups_must_agree
        gang.run(load_and_save, kind, saved[source], target, world=world)
        assert contents(target) == expected, f"{source} to {kind}"


def load_only(kind: str, source: str) -> None:
    sw.load(source, build(kind, 2))


def test_groups_must_agree(gang: Gang, saved: dict[str, str]) -> None:
    outcomes = gang.outcomes(load_only, "fsdp1_flat", saved["plain"], world=4)
    for outcome in outcomes:
        assert isinstance(outcome.exception, sw.MismatchError)
        assert "lr" in str(outcome.exception)
