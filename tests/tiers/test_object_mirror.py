"""A mirror in an object store on loopback: copies, removals, damage and a lost root."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.retention import committed_steps
from shardwise.store import LocalStore, open_store
from shardwise.tiers.decide import SavedSteps
from shardwise.tiers.mirroring import Mirroring
from shardwise.tiers.record import read_mirror_record
from tests.store.servers import Server, moto
from tests.tiers.test_mirror import data_file, flip, save, state

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
    store = open_store(url)
    assert committed_steps(LocalStore(root)) == [5]
    assert committed_steps(store) == [2, 4, 5]
    for step in (2, 4, 5):
        target = state(0)
        sw.load(store.at(step_directory(step)), target)
        assert torch.equal(target["t"], state(step)["t"])
    assert not [name for name in store.at(step_directory(5)).list() if "lock" in name]
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
    names = {path.name for path in (root / step_directory(1)).iterdir()}
    assert {MANIFEST} < names <= set(open_store(url).at(step_directory(1)).list())


def test_a_copy_to_a_bucket_is_continued(moto: Server, tmp_path: Path) -> None:
    """Of a killed copy without a manifest, the whole file is not sent again."""
    root, url = tmp_path / "root", moto.new_url()
    save(root, 1, mirror=url)
    store = open_store(url)
    store.at(step_directory(1)).delete(MANIFEST)
    each = Mirroring(LocalStore(root), sw.Keep(), sw.Mirror(store))
    assert each.catch_up(SavedSteps)
    assert each.record.steps[1].bytes == 0
    assert committed_steps(store) == [1]
    assert not moto.unfinished_uploads(url)


def test_a_bucket_that_cannot_be_reached_is_reported(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root, 1, 2)
    store = open_store(f"s3://bucket/run?endpoint={REFUSED}&region=us-east-1&retry=1")
    each = Mirroring(LocalStore(root), sw.Keep(last=1), sw.Mirror(store))
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(each.catch_up(lambda: SavedSteps(2))))
    thread.start()
    thread.join(60.0)
    assert done == [False]  # in a bounded time
    record = read_mirror_record(LocalStore(root))
    assert record is not None
    assert (record.waiting, record.pinned) == ((2, 1), (1,))
    assert record.failure
    assert committed_steps(LocalStore(root)) == [1, 2]


def test_a_mirror_serves_a_bucket_but_its_record_is_not_followed(
    moto: Server, tmp_path: Path
) -> None:
    """Whoever may write to the bucket could have written the record."""
    url, mirror = moto.new_url(), tmp_path / "mirror"
    save(url, 1, mirror=mirror)  # type: ignore[arg-type]  # a URL
    store = open_store(url).at(step_directory(1))
    (name,) = [name for name in store.list() if name.endswith(".safetensors")]
    intact = store.read(name, limit=1 << 30)
    damaged = intact[:70_000] + bytes([intact[70_000] ^ 1]) + intact[70_001:]
    store.publish(name, damaged, replace=True)
    with pytest.raises(sw.CorruptionError):
        sw.load(url, state(0))
    with sw.Checkpointer(url, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 1
        assert torch.equal(target["t"], state(1)["t"])
