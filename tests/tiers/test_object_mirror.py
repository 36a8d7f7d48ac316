"""A mirror in an object store on loopback: copies, removals, damage and a lost root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.store.servers import Server, moto
from tests.tiers.test_mirror import data_file, files_of, flip, save, state
from tests.tools.agents import until
from tests.tools.listings import mirror_of, steps_of

__all__ = ["moto"]
REFUSED = "http://127.0.0.1:9/"  # nobody listens there


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of the tests' own, so that no others are looked for."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


def test_a_bucket_mirrors_a_directory(moto: Server, tmp_path: Path) -> None:
    root, url = tmp_path / "root", moto.new_url()
    mirror = sw.Mirror(url, keep=sw.Keep(multiple_of=2))
    save(root, 1, 2, 3, 4, 5, keep=sw.Keep(last=1), mirror=mirror)
    assert steps_of(root) == [5]
    assert steps_of(url) == [2, 4, 5]
    for step in (2, 4, 5):
        target = state(0)
        sw.load(url, target, step=step)
        assert torch.equal(target["t"], state(step)["t"])
    assert not [name for name in moto.keys(url) if "lock" in name or "lease" in name]
    flip(data_file(root, 5), 70_000)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 5
        assert torch.equal(target["t"], state(5)["t"])
        assert checkpointer.steps() == [2, 4, 5]
    assert sw.open(root, step=2)["t"][0] == 2.0  # by the record in the root
    shutil.rmtree(root)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        assert checkpointer.restore(target) == 5
        assert torch.equal(target["t"], state(5)["t"])


def test_a_step_that_is_saved_again_is_replaced_in_a_bucket(
    moto: Server,
    tmp_path: Path,
) -> None:
    root, url = tmp_path / "root", moto.new_url()
    save(root, 1, mirror=url)
    save(root, 1, mirror=url, seed=100)
    target = state(0)
    sw.load(url, target)
    assert torch.equal(target["t"], state(101)["t"])
    for name, content in files_of(root, 1).items():
        assert moto.read(url, f"step-00000001/{name}") == content


def test_a_copy_to_a_bucket_is_continued(moto: Server, tmp_path: Path) -> None:
    """Of a killed copy without a manifest, the whole file is not sent again."""
    root, url = tmp_path / "root", moto.new_url()
    save(root, 1, mirror=url)
    moto.delete(url, "step-00000001/manifest.json")
    sw.Checkpointer(root, mirror=url, memory=None).close()
    record = mirror_of(root)
    assert record is not None
    assert record.steps[1].bytes == 0
    assert steps_of(url) == [1]
    assert not moto.unfinished_uploads(url)


def test_a_bucket_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root, 1)
    url = f"s3://bucket/run?endpoint={REFUSED}&region=us-east-1&retry=1"
    checkpointer = sw.Checkpointer(root, mirror=url, keep=sw.Keep(last=1), memory=None)
    handle = checkpointer.save(2, state(2), overwrite=True)
    assert handle is not None

    def is_failing() -> bool:
        record = mirror_of(root)
        return record is not None and (record.waiting, record.pinned) == ((2, 1), (1,))

    until(is_failing)  # in a bounded time
    with pytest.raises(TimeoutError, match=r"step 2 is not in the mirror .*Reason: "):
        handle.mirrored(0.1)
    checkpointer.close(wait=False)
    assert steps_of(root) == [1, 2]


def test_a_mirror_serves_a_bucket_but_its_record_is_not_followed(
    moto: Server, tmp_path: Path
) -> None:
    """Whoever may write to the bucket could have written the record."""
    url, mirror = moto.new_url(), tmp_path / "mirror"
    save(url, 1, mirror=mirror)  # type: ignore[arg-type]  # a URL
    (name,) = [name for name in moto.keys(url) if name.endswith(".safetensors")]
    intact = moto.read(url, name)
    moto.put(url, name, intact[:70_000] + bytes([intact[70_000] ^ 1]) + intact[70_001:])
    with pytest.raises(sw.CorruptionError):
        sw.load(url, state(0))
    with sw.Checkpointer(url, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 1
        assert torch.equal(target["t"], state(1)["t"])
