"""Saved under each parallelism of torch, loaded under each other, equal to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing import Gang
from tests.breadth import mostly_long
from tests.multirank.models import WORLDS, build, train

KINDS = {world: [kind for kind in WORLDS if WORLDS[kind] == world] for world in (1, 2, 4)}


def save_trained(kinds: list[str], root: str) -> None:
    """Train for two steps under each parallelism, and save."""
    for kind in kinds:
        state = build(kind, 1)
        train(state)
        sw.save(f"{root}/{kind}", state, check_replicas=True)


def load_and_save(kinds: list[str], source: str, root: str) -> None:
    """Load into runs of other parallelisms that have not stepped, and save them again."""
    for kind in kinds:
        state = build(kind, 2)
        sw.load(source, state)
        sw.save(f"{root}/{kind}", state, check_replicas=True)


def contents(path: str | Path) -> dict[str, object]:
    """Every name of a checkpoint: the bytes of tensors, and plain values."""
    checkpoint = sw.open(path)
    found: dict[str, object] = {}
    for name in checkpoint:
        value = checkpoint[name]
        if isinstance(value, sw.SavedTensor):
            plain = value[...].reshape(-1).view(torch.uint8)
            found[name] = value.dtype, value.shape, plain.numpy().tobytes()
        elif name.endswith("param_groups"):
            # By member, for groups are joined in no stated order.
            assert isinstance(value, list)
            found[name] = {member: group["value"] for group in value for member in group["members"]}
        else:
            found[name] = value
    return found


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each parallelism."""
    root = tmp_path_factory.mktemp("matrix")
    for world, kinds in KINDS.items():
        gang.run(save_trained, kinds, str(root), world=world)
    return root


@pytest.mark.parametrize("kind", WORLDS)
def test_it_saves_what_one_process_would(saved: Path, kind: str) -> None:
    """Parameters, buffers and moments are those of a model that no one has split."""
    expected = contents(saved / "plain")
    assert sum(name.endswith(".exp_avg") for name in expected) == 4 * 6 + 2
    assert isinstance(expected["optimizer.param_groups"], dict)
    assert contents(saved / kind) == expected


SOURCES = ["plain", "fsdp1_flat", "fsdp2_uneven", "hsdp_tp", "interleaved"]


@pytest.mark.parametrize("source", mostly_long(WORLDS, SOURCES))
def test_it_loads_under_every_other(gang: Gang, saved: Path, tmp_path: Path, source: str) -> None:
    expected = contents(saved / source)
    for world, kinds in KINDS.items():
        gang.run(load_and_save, kinds, str(saved / source), str(tmp_path), world=world)
    for kind in WORLDS:
        assert contents(tmp_path / kind) == expected, f"{source} to {kind}"
