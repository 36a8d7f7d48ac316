"""Stores in file systems of fsspec: the conformance suite, and what is special."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.errors import StoreError
from shardwise.store import Store, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file, write_file

fsspec = pytest.importorskip("fsspec", reason="these stores need fsspec")

from shardwise.store.fsspec_store import FsspecFiles  # noqa: E402
from shardwise.store.remote_files import RemoteFileStore  # noqa: E402

_numbers = itertools.count()


@pytest.fixture
def place() -> Iterator[str]:
    place = f"memory://runs/{next(_numbers)}"
    yield place
    memory = fsspec.filesystem("memory")
    if memory.exists(place):
        memory.rm(place, recursive=True)


class TestInMemory(StoreSuite):
    @pytest.fixture
    def store(self, place: str) -> Store:
        return open_store(place)


class TestInFiles(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return RemoteFileStore(FsspecFiles("local://"), f"{tmp_path}/store")


def test_a_place_is_its_url(place: str) -> None:
    store = open_store(place)
    assert str(store) == place
    assert str(store.at("step")) == f"{place}/step"
    assert str(pickle.loads(pickle.dumps(store))) == place


def test_a_checkpoint_is_saved_and_loaded(place: str) -> None:
    state = {"weight": torch.randn(300, 500), "step": 7}
    sw.save(place, state)
    with pytest.raises(sw.CheckpointExistsError):
        sw.save(place, state)
    loaded = {"weight": torch.zeros(300, 500), "step": 0}
    sw.load(place, loaded)
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 7


def test_files_that_are_not_committed_are_deleted(place: str) -> None:
    store = open_store(place)
    file = store.create(KEY, 5000)
    file.write_at(0, content(1000))
    file.close()
    assert store.list() == []


def test_a_directory_is_not_a_file(place: str) -> None:
    store = open_store(place)
    write_file(store.at("below"), KEY, content(5))
    with pytest.raises(StoreError, match="is a directory"):
        store.open("below")
    with pytest.raises(NotADirectoryError):
        store.at("below").at(KEY).list()


def test_unknown_schemes_and_options_are_refused() -> None:
    with pytest.raises(StoreError, match="unknown scheme nonsense://"):
        open_store("nonsense://host/path")
    with pytest.raises(StoreError, match="unknown option"):
        open_store("memory://runs/1?port=5")
    with pytest.raises(StoreError, match="secret"):
        open_store("memory://runs/1?password=5")


def test_a_file_system_without_times_cannot_lock(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.store.fsspec_store._TIMES", ())
    store = open_store(place)
    with pytest.raises(StoreError, match="does not tell when"), store.hold("lock", shared=False):
        pass


def test_another_process_reads_what_this_one_wrote(tmp_path: Path) -> None:
    store = RemoteFileStore(FsspecFiles("local://"), str(tmp_path))
    write_file(store, KEY, content(5000))
    pid = os.fork()
    if pid == 0:
        try:
            (tmp_path / "read").write_bytes(read_file(store, KEY))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert (tmp_path / "read").read_bytes() == content(5000).tobytes()
