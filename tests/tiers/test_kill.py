"""Mirroring is killed before each of its effects: what is committed in the mirror is whole."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.retention import committed_steps
from shardwise.store import LocalStore
from shardwise.tiers.decide import SavedSteps
from shardwise.tiers.mirroring import Mirroring
from tests.breadth import mostly_long
from tests.tiers.test_mirror import state
from tests.tools.faulty_store import Fault, FaultyStore

OLD, NEW = 0, 100  # the seeds of a step that was mirrored, and of the same step saved again


def save(root: Path, step: int, seed: int) -> None:
    value = {"t": state(step + seed)["t"][:70_000].clone(), "seed": seed}
    sw.save(root / step_directory(step), value, step=step, overwrite=True)


def loaded(root: Path, step: int) -> int:
    """Load a step of one tier; return the seed that all its values have."""
    target = {"t": torch.zeros(70_000), "seed": -1}
    sw.load(LocalStore(root / step_directory(step)), target)
    assert isinstance(target["seed"], int)
    assert torch.equal(target["t"], state(step + target["seed"])["t"][:70_000])
    return target["seed"]


def catch_up(root: Path, mirror: Path, fault: Fault) -> bool:
    source, target = (FaultyStore(LocalStore(each), fault) for each in (root, mirror))
    options = sw.Mirror(target, keep=sw.Keep(last=2))
    return Mirroring(source, sw.Keep(last=1), options).catch_up(lambda: SavedSteps(3))


def kill_at(root: Path, mirror: Path, index: int) -> None:
    """Catch up in another process, which is killed before its operation with this index."""
    child = os.fork()
    if child == 0:
        try:
            catch_up(root, mirror, Fault(index))
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The tiers before: the mirror has steps 1 and 2; step 2 was saved again, and step 3 is new."""
    for step in (1, 2):
        save(tmp_path / "before" / "root", step, OLD)
    root, mirror = tmp_path / "before" / "root", tmp_path / "before" / "mirror"
    shutil.copytree(root, mirror)
    save(root, 2, NEW)
    save(root, 3, NEW)
    return tmp_path / "before"


@pytest.mark.parametrize("most_of_a_kind", mostly_long([1, 1000], [1]))
def test_killed_at_any_operation_nothing_is_lost_or_mixed(
    before: Path, tmp_path: Path, most_of_a_kind: int
) -> None:
    clean = Path(shutil.copytree(before, tmp_path / "clean"))
    fault = Fault()
    assert catch_up(clean / "root", clean / "mirror", fault)
    assert_finished(clean)
    tried: Counter[tuple[str, int]] = Counter()
    publications = 0
    for index, operation in enumerate(fault.operations):
        verb = operation.split()[0]
        publications += verb == "publish"
        tried[verb, publications] += 1
        if tried[verb, publications] > most_of_a_kind:
            continue
        place = Path(shutil.copytree(before, tmp_path / f"at-{index}"))
        root, mirror = place / "root", place / "mirror"
        kill_at(root, mirror, index)
        in_mirror = committed_steps(LocalStore(mirror))
        seeds = {step: loaded(mirror, step) for step in in_mirror}
        assert seeds.get(1, OLD) == OLD, operation
        assert seeds.get(3, NEW) == NEW, operation
        kept = committed_steps(LocalStore(root))
        assert 3 in kept, operation
        assert 2 in kept or seeds[2] == NEW, operation  # nothing leaves before it is copied
        assert 2 in kept or 2 in in_mirror, operation
        assert in_mirror, operation
        assert catch_up(root, mirror, Fault()), operation
        assert_finished(place)
        shutil.rmtree(place)
    assert {"create", "write_at", "commit", "link", "replace", "delete"} <= {v for v, _ in tried}


def assert_finished(place: Path) -> None:
    root, mirror = place / "root", place / "mirror"
    assert committed_steps(LocalStore(root)) == [3]
    assert committed_steps(LocalStore(mirror)) == [2, 3]
    assert [loaded(mirror, step) for step in (2, 3)] == [NEW, NEW]
    for step in (2, 3):
        names = [path.name for path in (mirror / step_directory(step)).iterdir()]
        assert len(names) == 2, names
        assert MANIFEST in names
    sw.Checkpointer(root, memory=None).close()  # removes what an interrupted removal has left
    assert [path.name for path in root.iterdir() if path.is_dir()] == [step_directory(3)]
