"""A training with a mirror is killed before each of its effects: both tiers stay whole."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.tiers.test_mirror import state
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.gang import Gang
from tests.tools.listings import steps_of

OLD, NEW = 0, 100  # the seeds of a step that was mirrored, and of the same step saved again
EFFECTS = ("create", "write_at", "commit", "publish", "published", "link", "replace", "delete")


def value_of(step: int, seed: int) -> dict[str, object]:
    return {"t": state(step + seed)["t"][:70_000].clone(), "seed": seed}


def loaded(root: Path, step: int) -> int:
    """Load a step of one tier; return the seed that all its values have."""
    target = {"t": torch.zeros(70_000), "seed": -1}
    sw.load(FaultyStore(root / f"step-{step:08d}", Fault()), target)  # the store without its mirror
    assert isinstance(target["seed"], int)
    assert torch.equal(target["t"], state(step + target["seed"])["t"][:70_000])
    return target["seed"]


def save_step_3(root: Path, mirror: Path, fault: Fault) -> None:
    """Save step 3, and wait until it is mirrored and old steps are removed."""
    copies = sw.Mirror(FaultyStore(mirror, fault), keep=sw.Keep(last=2))
    store = FaultyStore(root, fault)
    options = {"keep": sw.Keep(last=1), "mirror": copies, "memory": None, "telemetry": False}
    with sw.Checkpointer(store, **options) as checkpointer:  # type: ignore[arg-type]
        checkpointer.save(3, value_of(3, NEW), overwrite=True)


def save_and_die(root: Path, mirror: Path, index: int) -> None:
    """On a rank: save, and be killed before the effect with this index."""
    save_step_3(root, mirror, Fault(index, verbs=EFFECTS))


def kill_at(gang: Gang, root: Path, mirror: Path, index: int) -> bool:
    """Save in another process, and return whether it died.

    A fork of this process might wait forever for locks of its other threads.
    """
    (outcome,) = gang.run_outcomes(save_and_die, root, mirror, index, world=1)
    # Its threads may take turns in another order, with fewer effects.
    assert outcome.kind in ("died", "value"), outcome.report
    return outcome.kind == "died"


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The tiers before: the mirror has steps 1 and 2, and step 2 was saved again."""
    root, mirror = tmp_path / "before" / "root", tmp_path / "before" / "mirror"
    for step in (1, 2):
        sw.save(root / f"step-{step:08d}", value_of(step, OLD), step=step)
    shutil.copytree(root, mirror)
    sw.save(root / "step-00000002", value_of(2, NEW), step=2, overwrite=True)
    return tmp_path / "before"


@pytest.mark.parametrize("most_of_a_kind", mostly_long([1, 1000], [1]))
def test_killed_at_any_effect_nothing_is_lost_or_mixed(
    gang: Gang, before: Path, tmp_path: Path, most_of_a_kind: int
) -> None:
    clean = Path(shutil.copytree(before, tmp_path / "clean"))
    fault = Fault(verbs=EFFECTS)
    save_step_3(clean / "root", clean / "mirror", fault)
    assert_finished(clean)
    tried: Counter[tuple[str, int]] = Counter()
    publications = deaths = 0
    for index, operation in enumerate(fault.operations):
        verb = operation.split()[0]
        publications += verb == "publish"
        kind = (verb, publications if most_of_a_kind > 1 else min(publications, 1))
        tried[kind] += 1
        if tried[kind] > most_of_a_kind:
            continue
        place = Path(shutil.copytree(before, tmp_path / f"at-{index}"))
        root, mirror = place / "root", place / "mirror"
        deaths += kill_at(gang, root, mirror, index)
        in_mirror, kept = steps_of(mirror), steps_of(root)
        seeds = {step: loaded(mirror, step) for step in in_mirror}
        assert seeds.get(1, OLD) == OLD, operation
        assert seeds.get(3, NEW) == NEW, operation
        assert all(loaded(root, step) == NEW for step in kept if step != 1), operation
        assert 3 in kept or kept == [1, 2], operation  # nothing leaves before the save is committed
        assert 2 in kept or seeds[2] == NEW, operation  # or before it is copied
        assert in_mirror, operation
        save_step_3(root, mirror, Fault())
        assert_finished(place)
        shutil.rmtree(place)
    assert set(EFFECTS) == {verb for verb, _ in tried}
    assert deaths >= len(EFFECTS)


def assert_finished(place: Path) -> None:
    root, mirror = place / "root", place / "mirror"
    assert steps_of(root) == [3]
    assert steps_of(mirror) == [2, 3]
    assert [loaded(mirror, step) for step in (2, 3)] == [NEW, NEW]
    for step in (2, 3):
        names = [path.name for path in (mirror / f"step-{step:08d}").iterdir()]
        assert len(names) == 2, names
        assert "manifest.json" in names
    sw.Checkpointer(root, memory=None).close()  # removes what an interrupted removal has left
    assert [path.name for path in root.iterdir() if path.is_dir()] == ["step-00000003"]
