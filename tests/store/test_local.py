"""The local store: conformance on disk and in memory, and what is its own."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.ports.store import Store, exists, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file, write_file
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.page_cache import is_cached

MEMORY = Path("/dev/shm")


class TestOnDisk(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "store")


@pytest.mark.skipif(not MEMORY.is_dir(), reason="this system has no file system in memory")
class TestInMemory(StoreSuite):
    """A file system that knows no direct I/O."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with tempfile.TemporaryDirectory(dir=MEMORY, prefix="shardwise-store-") as folder:
            yield open_store(Path(folder, "store"))


class TestThroughPageCache(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/store?page_cache=true")


class TestFaultyWithoutFault(StoreSuite):
    """A faulty store whose fault never comes is a store like any other."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FaultyStore(tmp_path / "store", Fault())


def aligned(nbytes: int) -> np.ndarray:
    """Memory that begins at a page, as direct I/O needs it."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_places_are_paths_urls_or_stores(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert open_store(store) is store
    for place in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        assert str(open_store(place)) == str(tmp_path)
    with pytest.raises(StoreError, match="unknown scheme ftp9://"):
        open_store("ftp9://bucket/run")


def test_files_stay_in_the_page_cache_only_on_request(tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.write_bytes(b"1" * 8192)
    with written.open("rb") as file:
        if not is_cached(file.fileno(), 8192):
            pytest.skip("this system does not say what the page cache contains")
    for name in ("direct", "cached"):
        option = "?page_cache=true" if name == "cached" else ""
        store = open_store(f"file://{tmp_path}/{name}{option}").at("run")
        assert str(open_store(str(store))) == str(store)
        data = content(1 << 20)
        write_file(store, KEY, data)
        with open(tmp_path / name / "run" / KEY, "rb") as file:
            if name == "direct" and is_cached(file.fileno(), len(data)):
                pytest.skip("this file system has no direct I/O")
            assert is_cached(file.fileno(), len(data)) == (name == "cached")
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert not is_cached(file.fileno(), len(data))
            assert read_file(store, KEY) == data.tobytes()
            assert is_cached(file.fileno(), len(data)) == (name == "cached")


def test_what_open_reads_stays_in_the_page_cache_and_what_load_reads_does_not(
    tmp_path: Path,
) -> None:
    saved = torch.arange(1 << 18, dtype=torch.float32)
    sw.save(tmp_path / "it", {"t": saved})
    (data,) = (tmp_path / "it").glob("*.safetensors")
    with data.open("rb") as file:
        if is_cached(file.fileno(), saved.nbytes):
            pytest.skip("this file system has no direct I/O, or does not say what is cached")
        loaded = torch.zeros(1 << 18)
        sw.load(tmp_path / "it", {"t": loaded})
        assert torch.equal(loaded, saved)
        assert not is_cached(file.fileno(), saved.nbytes)
        tensor = sw.open(tmp_path / "it")["t"]
        assert isinstance(tensor, sw.SavedTensor)
        assert torch.equal(tensor[...], saved)
        assert is_cached(file.fileno(), saved.nbytes)


def test_options_of_file_urls_are_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="page_cache=yes: expected true or false"):
        open_store(f"file://{tmp_path}?page_cache=yes")
    with pytest.raises(StoreError, match="unknown option 'cache'"):
        open_store(f"file://{tmp_path}?cache=true")


@pytest.mark.parametrize("name", ["a b", "epoch=0-step=10.ckpt", "é", "..."])
def test_files_of_other_programs_are_read_under_any_name(tmp_path: Path, name: str) -> None:
    if not name.isascii() and sys.getfilesystemencoding() == "ascii":
        pytest.skip("this locale has no such names of files")
    (tmp_path / name).write_bytes(b"content")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / name).mkdir()
    store = open_store(tmp_path)
    assert store.read(name, limit=7) == b"content"
    assert read_file(store, name) == b"content"
    assert store.at("below").at(name).list() == []


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="symbolic link"):
        store.open("link")
    with pytest.raises(StoreError, match="symbolic link"):
        store.read("link", limit=100)


@pytest.mark.parametrize("kind", ["directory", "pipe", "link"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    if kind == "directory":
        (tmp_path / "it").mkdir()
    elif kind == "pipe":
        os.mkfifo(tmp_path / "it")
    else:
        (tmp_path / "it").symlink_to("it")
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match=r"not a regular file|symbolic link"):
        store.open("it")
    with pytest.raises(StoreError, match=r"not a regular file|symbolic link"):
        store.read("it", limit=100)
    with store.lock("it", shared=True) as held:  # a read says why it is not opened
        assert not held
    with (
        pytest.raises(StoreError, match=r"/it is .*(not a regular file|symbolic link)"),
        store.lock("it"),
    ):
        pass


def test_a_file_whose_pages_are_cached_is_read_the_same(tmp_path: Path) -> None:
    store, data = open_store(tmp_path), content(100_000)
    write_file(store, KEY, data)
    assert (tmp_path / KEY).read_bytes() == data.tobytes()
    assert read_file(store, KEY) == data.tobytes()


def test_threads_find_together_that_a_file_system_has_no_direct_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads get the same error, and the other one has already gone on to the page cache."""
    pwrite, failures = os.pwrite, []

    def fail_once(fd: int, data: memoryview, offset: int) -> int:
        if not failures:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
            failures.append(OSError(errno.EINVAL, "no direct writes"))
            raise failures[0]
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", fail_once)
    store = open_store(tmp_path)
    write_file(store, KEY, content(8192))
    assert read_file(store, KEY) == content(8192).tobytes()
    assert failures


def test_what_was_not_committed_promises_nothing_but_is_listed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    file = store.create(KEY, 5000)
    file.write_at(0, aligned(4096))
    file.close()
    assert store.list() == [KEY]


def test_a_failed_publication_leaves_nothing_beside(tmp_path: Path) -> None:
    def fail(operation: str) -> None:
        raise OSError(operation)

    for verb in ("fsync", "link"):
        store = FaultyStore(tmp_path, Fault(0, fail, verbs=(verb,)))
        with pytest.raises(OSError, match=verb):
            store.publish("manifest.json", b"one", replace=False)
        assert store.list() == []


@pytest.mark.parametrize("keeps_open_files", [False, True], ids=["local", "nfs"])
def test_a_lock_that_was_deleted_before_it_was_locked_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_open_files: bool
) -> None:
    lock = fcntl.flock

    def deleted_first(fd: int, operation: int) -> None:
        if keeps_open_files:
            (tmp_path / "lock").rename(tmp_path / ".nfs0000000000a1b2c300000001")
        else:
            (tmp_path / "lock").unlink()
        lock(fd, operation)

    monkeypatch.setattr("shardwise.kernel.store.local_files.fcntl.flock", deleted_first)
    with open_store(tmp_path).lock("lock") as held:
        assert not held


def test_a_lock_of_a_deleted_file_of_another_client_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(fd: int, operation: int) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shardwise.kernel.store.local_files.fcntl.flock", lock)
    with open_store(tmp_path).lock("lock") as held:
        assert not held


def test_a_file_that_is_replaced_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of NFS remembers the name of the file that was there before."""
    store, failures, fstat = open_store(tmp_path), [2], os.fstat
    store.publish("manifest.json", b"content", replace=False)

    def stale_first(fd: int) -> os.stat_result:
        failures[0] -= 1
        if failures[0] >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return fstat(fd)

    monkeypatch.setattr("shardwise.kernel.store.local_files.os.fstat", stale_first)
    assert store.read("manifest.json", limit=100) == b"content"
    failures[0] = 10
    with pytest.raises(OSError, match="Stale"):
        store.read("manifest.json", limit=100)


def test_a_file_that_another_client_deleted_while_it_was_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write_file(store, KEY, content(5000))
    reader = store.open(KEY)

    def stale(*_: object) -> int:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr("shardwise.kernel.store.local_files.os.preadv", stale)
    with pytest.raises(FileNotFoundError, match=rf"deleted or replaced.*{KEY}"):
        reader.read_at(0, np.zeros(5000, np.uint8))
    reader.close()


def test_a_link_that_was_made_although_its_answer_was_lost_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS: the client asks again, and the server answers that the name is taken."""
    link = os.link

    def linked_before(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(target)

    monkeypatch.setattr("shardwise.kernel.store.local_files.os.link", linked_before)
    store = open_store(tmp_path)
    store.publish("manifest.json", b"one", replace=False)
    assert store.read("manifest.json", limit=3) == b"one"
    assert store.list() == ["manifest.json"]
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        store.publish("manifest.json", b"two", replace=False)


def test_files_that_nfs_keeps_for_readers_are_ignored(tmp_path: Path) -> None:
    store = open_store(tmp_path / "step")
    write_file(store, KEY, content(10))
    kept = tmp_path / "step" / ".nfs0000000000a1b2c300000001"
    kept.touch()
    with pytest.raises(OSError, match="not empty"):
        store.delete("")
    store.delete(KEY)
    assert store.list() == []
    store.delete("")
    kept.unlink()
    store.delete("")
    assert not exists(store)
