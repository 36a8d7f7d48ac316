"""What `load`, `open` and the commands do with a root that has a mirror."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cli.conftest import Run, run
from tests.memory.test_snapshots import shm
from tests.tiers.test_mirror import data_file, flip, save, state
from tests.tools.agents import until
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.listings import steps_of

__all__ = ["run", "shm"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with steps 3 and 4, and a mirror with steps 1 to 4."""
    root = tmp_path / "root"
    save(root, 1, 2, 3, 4, keep=sw.Keep(last=2), mirror=tmp_path / "mirror")
    return root


def test_a_load_of_the_root_uses_the_mirror(root: Path) -> None:
    flip(data_file(root, 4), 70_000)
    target = state(0)
    assert sw.load(root, target).step == 4
    assert torch.equal(target["t"], state(4)["t"])
    assert sw.open(root, step=1)["t"][7] == 8.0
    sw.load(root / "step-00000004", target)
    sw.load(root / "step-00000001", target)
    assert torch.equal(target["t"], state(1)["t"])
    with pytest.raises(sw.CorruptionError):  # a store is only itself
        sw.load(FaultyStore(root / "step-00000004", Fault()), target)


@pytest.mark.parametrize("how", ["others may read it", "damaged", "unknown scheme"])
def test_a_record_that_cannot_be_trusted_is_not_followed(
    root: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = root / "mirror.json"
    if how == "others may read it":
        record.chmod(0o644)
    elif how == "damaged":
        record.write_bytes(b"{")
    else:
        record.write_bytes(record.read_bytes().replace(b'"place":"', b'"place":"gopher://'))
    assert sw.open(root).step == 4
    assert "is read without its mirror" in caplog.text
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(root, step=1)


def test_ls_shows_what_is_mirrored(root: Path, run: Run) -> None:
    sw.save(root / "step-00000005", state(5), step=5)
    document = run("ls", root, "--json").document
    assert [(each["step"], each["mirrored"]) for each in document["checkpoints"]] == [
        (3, True),
        (4, True),
        (5, False),
    ]
    assert document["mirror"]["place"] == str(root.parent / "mirror")
    shown = run("ls", root).out.splitlines()
    assert shown[0].split()[-1] == "mirrored"
    assert [line.split()[-1] for line in shown[1:4]] == ["yes", "yes", "no"]
    assert shown[4] == f"mirror: {root.parent / 'mirror'}, which also has step 1…2"


def test_verify_checks_each_tier_alone(root: Path, run: Run) -> None:
    flip(data_file(root, 4), 70_000)
    assert run("verify", root).status == 1
    assert run("verify", root.parent / "mirror").status == 0


def test_the_status_of_an_agent_shows_a_failing_mirror(
    root: Path, tmp_path: Path, shm: Path, run: Run
) -> None:
    mirror = tmp_path / "mirror"
    shutil.rmtree(mirror)
    mirror.write_text("in the way")
    memory = sw.Memory(dir=str(shm), snapshot_every=0)
    options = {"mirror": mirror, "keep": sw.Keep(last=1), "memory": memory}
    with sw.Checkpointer(root, **options) as checkpointer:  # type: ignore[arg-type]
        handle = checkpointer.save(5, state(5), overwrite=True)
        assert handle is not None
        handle.result(60.0)
        agent = sw.NodeAgent(shm)
        until(lambda: any(each.pinned == [3, 4] for each in agent.status().mirrors))
        (status,) = agent.status().mirrors
        assert (status.root, status.mirror) == (str(root), str(mirror))
        assert status.waiting == [5, 4, 3]
        assert status.failing is not None
        assert "NotADirectoryError" in status.failure
        shown = run("agent", "status", "--dir", shm).out
        assert f"mirror {mirror} of {root}: has nothing; step 3…5 waits to be copied" in shown
        assert "step 3…4 stays in the root only until it is copied" in shown
        shown = run("ls", root).out
        assert "copying to the mirror fails, and is tried again: NotADirectoryError" in shown
        assert steps_of(root) == [3, 4, 5]
        checkpointer.close(wait=False)
