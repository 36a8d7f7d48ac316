"""Saved under each parallelism of torch, loaded under each other, equal to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.multirank.models import WORLDS, build, train
from tests.tools.gang import Gang

KINDS = {world: [kind for kind in WORLDS if WORLDS[kind] == world] for world in (1, 2, 4)}


def save_trained(kinds: list[str], root: str) -> None:
    """Train for two steps under each parallelism, and save."""
    for kind in kinds:
        state = build(kind, 1)
        train(state)
        sw.save(f"{root}/{kind}", state, check_replicas=True)


def load_and_save(pairs: list[tuple[str, str]], saved: str, root: str) -> None:
    """For each source and kind: load into a run that has not stepped, and save it again."""
    for source, kind in pairs:
        state = build(kind, 2)
        sw.load(f"{saved}/{source}", state)
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


@pytest.mark.parametrize("shift", mostly_long(range(len(WORLDS)), [5]))
def test_it_loads_under_every_other(gang: Gang, saved: Path, tmp_path: Path, shift: int) -> None:
    """Each parallelism loads what the one that is `shift` places before it in `WORLDS` saved."""
    names = list(WORLDS)
    sources = {kind: names[index - shift] for index, kind in enumerate(names)}
    for world, kinds in KINDS.items():
        pairs = [(sources[kind], kind) for kind in kinds]
        gang.run(load_and_save, pairs, str(saved), str(tmp_path), world=world)
    for kind, source in sources.items():
        assert contents(tmp_path / kind) == contents(saved / source), f"{source} to {kind}"
