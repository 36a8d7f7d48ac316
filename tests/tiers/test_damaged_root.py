"""What is damaged in the root and intact in the mirror is read from the mirror."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.tiers.test_mirror import (
    DAMAGES,
    damage_file,
    data_file,
    files_of,
    flip,
    mirror,
    root,
    save,
    state,
)

__all__ = ["mirror", "root"]


def restore(checkpointer: sw.Checkpointer, step: int, seed: int = 0) -> dict[str, int]:
    """Restore a step, and compare all bytes; return how many bytes came from where."""
    target = state(-1)
    assert checkpointer.restore(target) == step
    assert torch.equal(target["t"], state(step + seed)["t"])
    assert target["step"] == step + seed
    assert checkpointer.last_restore is not None
    return checkpointer.last_restore.origins


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("of", ["data", "manifest"])
def test_a_damaged_file_is_read_from_the_mirror(
    root: Path, mirror: Path, how: str, of: str
) -> None:
    if (of, how) == ("manifest", "missing"):
        pytest.skip("then the checkpoint was removed")
    save(root, 1, 2, mirror=mirror)
    damaged = data_file(root, 2) if of == "data" else root / "step-00000002" / "manifest.json"
    damage_file(damaged, how)
    before = files_of(root, 2)
    with sw.Checkpointer(root, mirror=mirror, memory=None, save_at_end=False) as checkpointer:
        origins = restore(checkpointer, 2)
        # A file that is too long has all the bytes that were saved.
        assert (origins["mirror"] > 0) == (of == "data" and how != "longer")
        assert sum(origins.values()) == origins["mirror"] + origins["root"]
    assert files_of(root, 2) == before
    with sw.Checkpointer(root, mirror=mirror, memory=None, save_at_end=False) as checkpointer:
        restore(checkpointer, 2)


def test_an_intact_root_gives_all_bytes(root: Path, mirror: Path) -> None:
    save(root, 1, mirror=mirror)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        origins = restore(checkpointer, 1)
        assert origins.pop("root") >= 4 * 400_000
        assert not any(origins.values())
        for path in (root / "step-00000001").iterdir():
            path.unlink()
        origins = restore(checkpointer, 1)
        assert origins.pop("mirror") >= 4 * 400_000
        assert not any(origins.values())


def test_the_earlier_save_in_the_mirror_is_restored(
    root: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1, mirror=mirror)
    save(root, 1, seed=100)
    flip(data_file(root, 1), 70_000)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        origins = restore(checkpointer, 1)
        assert origins["mirror"] > 0
        assert origins["root"] == 0
        assert checkpointer.last_restore is not None
        ((step, why),) = checkpointer.last_restore.skipped
        assert step == 1
        assert "differ from those that were saved" in why
        assert "step 1 was saved again; trying its earlier save in" in caplog.text
        checkpointer.save(1, state(7))  # replaces what is damaged
        checkpointer.save(2, state(2))
    assert torch.equal(sw.open(root, step=1)["t"][:], state(7)["t"])
    flip(data_file(mirror, 2), 70_000)
    flip(data_file(root, 2), 70_000)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        restore(checkpointer, 1, seed=6)
