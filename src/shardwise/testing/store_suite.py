"""Conformance tests for stores: subclass `StoreSuite` and define its `store` fixture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import Store, name_of
from shardwise.kernel.store.store import Buffer

KEY = "r00000-0123456789abcdef.safetensors"
UNSAFE = ["", ".", "..", "a/b", "../a", "/a", "a\0", "a" * 256]
UNUSUAL = ["a b", "epoch=0.ckpt", "é"]


def content(size: int, seed: int = 0) -> Buffer:
    """Return page-aligned random bytes."""
    buffer = aligned_buffer(size)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return buffer


def padded(data: Buffer, alignment: int) -> Buffer:
    """Return the same bytes, padded with zeros to the alignment."""
    buffer = aligned_buffer(-(-len(data) // alignment) * alignment)
    buffer[: len(data)] = data
    return buffer


def write_file(store: Store, key: str, data: Buffer) -> None:
    """Create a file of these bytes, in one write."""
    with closing(store.create(key, len(data))) as file:
        if len(data):
            file.write_at(0, padded(data, store.traits.alignment))
        file.commit()


def read_file(store: Store, path: str, size: int | None = None) -> bytes:
    """Return all bytes of a file, in one read."""
    with closing(store.open(path, size)) as file:
        buffer = aligned_buffer(file.size)
        return buffer[: file.read_at(0, buffer)].tobytes()


class StoreSuite:
    """The conformance tests of a store.

    Define a subclass in a test module, with a fixture `store` that yields an empty store.
    """

    @pytest.fixture
    def store(self) -> Store:
        """An empty store; its directory need not exist yet."""
        raise NotImplementedError("define a fixture `store`")

    @pytest.mark.parametrize("size", [0, 1, 511, 4096, 4097, 70_000])
    def test_what_is_written_is_read(self, store: Store, size: int) -> None:
        """A file has the size given to `create`, whatever the alignment."""
        data = content(size)
        write_file(store, KEY, data)
        assert read_file(store, KEY) == data.tobytes()
        assert store.list() == [KEY]

    def test_writes_may_come_in_any_order_from_any_thread(self, store: Store) -> None:
        """Every write takes effect at its offset."""
        unit = 4 * store.traits.alignment
        data = content(16 * unit + 100)
        image = padded(data, store.traits.alignment)
        starts = reversed(range(0, len(image), unit))
        with closing(store.create(KEY, len(data))) as file:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(lambda at: file.write_at(at, image[at : at + unit]), starts))
            file.commit()
        assert read_file(store, KEY) == data.tobytes()

    def test_reads_may_begin_anywhere_and_end_with_the_file(self, store: Store) -> None:
        """Offsets need not be aligned; only a read past the end is short."""
        data = content(20_000)
        write_file(store, KEY, data)
        with closing(store.open(KEY)) as file:
            assert file.size == len(data)
            for low, count in [(0, 4096), (4096, 8192), (1, 10), (4097, 9000), (19_990, 500)]:
                out = aligned_buffer(count)
                expected = data[low : low + count].tobytes()
                assert file.read_at(low, out) == len(expected)
                assert out[: len(expected)].tobytes() == expected
            assert file.read_at(len(data), aligned_buffer(4096)) == 0

    def test_reads_of_several_threads_may_overlap(self, store: Store) -> None:
        """Every read returns the bytes at its offset."""
        data = content(1 << 20)
        write_file(store, KEY, data)

        def read(low: int) -> bool:
            out = aligned_buffer(8192)
            count = file.read_at(low, out)
            return bool((out[:count] == data[low : low + count]).all()) and count == 8192

        with closing(store.open(KEY)) as file, ThreadPoolExecutor(4) as pool:
            assert all(pool.map(read, range(0, (1 << 20) - 8192, 12_288)))

    def test_no_file_is_created_twice(self, store: Store) -> None:
        """A second `create` fails and leaves the file unchanged."""
        data = content(5000)
        write_file(store, KEY, data)
        with pytest.raises(FileExistsError):
            store.create(KEY, 1)
        assert read_file(store, KEY) == data.tobytes()

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        """A missing file, or one in a missing store, raises FileNotFoundError."""
        for place in (store, store.at("below")):
            with pytest.raises(FileNotFoundError):
                place.open(KEY)
            with pytest.raises(FileNotFoundError):
                place.read(KEY, limit=10)
            assert place.list() == []
            assert place.walk(10) == {}
            assert place.stat(KEY) is None
            if not place.traits.lock_expiry:
                with place.lock(KEY, shared=True) as held:
                    assert not held
            place.delete(KEY)
            place.delete("")

    def test_publishing_replaces_only_if_it_may(self, store: Store) -> None:
        """Without `replace`, publishing over a file fails. No temporary file remains."""
        store.publish("manifest.json", b"one", replace=False)
        assert store.read("manifest.json", limit=3) == b"one"
        assert store.list() == ["manifest.json"]
        with pytest.raises(FileExistsError):
            store.publish("manifest.json", b"two", replace=False)
        assert store.read("manifest.json", limit=10) == b"one"
        store.publish("manifest.json", b"three", replace=True)
        assert store.read("manifest.json", limit=10) == b"three"
        assert store.list() == ["manifest.json"]

    def test_of_many_who_publish_at_once_one_succeeds(self, store: Store) -> None:
        """The others get FileExistsError."""
        start = threading.Barrier(8)

        def publish(number: int) -> bool:
            start.wait()
            try:
                store.publish("manifest.json", b"%d" % number, replace=False)
            except FileExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            published = list(pool.map(publish, range(8)))
        assert sum(published) == 1
        assert store.read("manifest.json", limit=1) == b"%d" % published.index(True)
        assert store.list() == ["manifest.json"]

    def test_readers_never_see_half_a_publication(self, store: Store) -> None:
        """A reader sees the old or the new content, never a mix."""
        versions = [bytes([i]) * 50_000 for i in range(2)]
        store.publish("manifest.json", versions[0], replace=False)
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                assert store.read("manifest.json", limit=50_000) in versions

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for i in range(20):
                    store.publish("manifest.json", versions[(i + 1) % 2], replace=True)
            finally:
                done.set()
            for reader in readers:
                reader.result()

    def test_a_file_that_is_too_large_is_not_read_whole(self, store: Store) -> None:
        """Reading a file larger than `limit` raises StoreError."""
        store.publish("manifest.json", b"12345", replace=False)
        with pytest.raises(StoreError):
            store.read("manifest.json", limit=4)

    def test_stores_below_are_apart(self, store: Store) -> None:
        """Stores do not share files; `list` includes the names of the stores below."""
        store.at("step-1").publish("a", b"1", replace=False)
        store.at("step-2").publish("a", b"2", replace=False)
        assert store.list() == ["step-1", "step-2"]
        assert store.at("step-1").read("a", limit=1) == b"1"
        assert store.at("step-2").list() == ["a"]
        store.at("step-1").delete("a")
        store.at("step-1").delete("")
        assert store.list() == ["step-2"]
        assert store.at("step-2").read("a", limit=1) == b"2"

    def test_deleting(self, store: Store) -> None:
        """A deleted file is gone; deleting a missing file is not an error."""
        for key in ("b", "a", "c"):
            write_file(store, key, content(10))
        assert store.list() == ["a", "b", "c"]
        store.delete("b")
        store.delete("b")
        assert store.list() == ["a", "c"]

    def test_a_store_that_is_not_empty_is_not_removed(self, store: Store) -> None:
        """Removing a store with files fails and deletes none of them."""
        below = store.at("below")
        write_file(below, KEY, content(10))
        with pytest.raises(OSError):  # noqa: PT011 - the message depends on the store
            below.delete("")
        assert below.list() == [KEY]

    def test_the_text_of_a_store_ends_with_its_name(self, store: Store) -> None:
        """Options of a URL come after it."""
        below = store.at("one").at("two")
        assert name_of(below) == "two"
        assert str(below).partition("?")[0] == f"{str(store).partition('?')[0]}/one/two"
        assert name_of(store.at("a b")) == "a b"

    def test_files_at_all_levels_are_found_and_opened(self, store: Store) -> None:
        """Sizes are those of the files, and versions change when a file is replaced."""
        assert store.walk(10) == {}
        write_file(store, "top", content(5))
        write_file(store.at("a").at("b"), "deep", content(7000, 1))
        write_file(store.at("a"), "mid", content(0))
        found = store.walk(10)
        sizes = {path: status.size for path, status in found.items()}
        assert list(sizes.items()) == [("a/b/deep", 7000), ("a/mid", 0), ("top", 5)]
        for size in (None, 7000):
            assert read_file(store, "a/b/deep", size) == content(7000, 1).tobytes()
        store.at("a").delete("mid")
        time.sleep(0.02)  # the clock of a file system may advance every 10 ms only
        write_file(store.at("a"), "mid", content(1))
        assert store.walk(10)["a/mid"].version != found["a/mid"].version
        assert store.walk(10)["top"] == found["top"]
        with pytest.raises(StoreError, match="2 files"):
            store.walk(2)
        with pytest.raises(FileNotFoundError):
            store.open("a/b/missing").read_at(0, aligned_buffer(1))

    def test_a_place_that_is_one_file_says_so(self, store: Store) -> None:
        """A directory and a place with nothing at it are not files."""
        place = store.at("one")
        assert (place.stat(""), place.list()) == (None, [])
        write_file(store, "one", content(50))
        above = store.stat("")
        assert above is None or above.is_directory
        for status in (place.stat(""), store.stat("one"), store.walk(1)["one"]):
            assert status is not None
            assert (status.size, status.is_directory) == (50, False)
        assert {path: status.size for path, status in place.walk(1).items()} == {"one": 50}
        assert read_file(place, "") == content(50).tobytes()

    def test_an_atomic_file_appears_when_it_is_committed(self, store: Store) -> None:
        """Until then, an earlier file stays; a file that is not committed never appears."""
        for seed in range(2):
            data = content(3 * store.traits.alignment + 1, seed)
            before = store.walk(10).get(KEY)
            for commits in (False, True):
                with closing(store.create(KEY, len(data), replace=True)) as file:
                    file.write_at(0, padded(data, store.traits.alignment))
                    assert store.walk(10).get(KEY) == before
                    if commits:
                        file.commit()
            assert read_file(store, KEY) == data.tobytes()

    @pytest.mark.parametrize("first_to_commit", [0, 1])
    def test_two_writers_of_an_atomic_file_do_not_disturb_each_other(
        self, store: Store, first_to_commit: int
    ) -> None:
        """Neither makes visible what the other has not completed."""
        contents = [content(2 * store.traits.alignment + 1, seed) for seed in range(2)]
        with ExitStack() as cleanup:
            files = [
                cleanup.enter_context(closing(store.create(KEY, len(data), replace=True)))
                for data in contents
            ]
            for writer in (first_to_commit, 1 - first_to_commit):
                data = contents[writer]
                files[writer].write_at(0, padded(data, store.traits.alignment))
                files[writer].commit()
                assert read_file(store, KEY) == data.tobytes()
        assert store.list() == [KEY]

    def test_one_holds_exclusively_or_many_share(self, store: Store) -> None:
        """A lock that is not available is reported at once. Others do not see how it is kept."""
        with store.lock("lock") as first:
            assert store.list() == ["lock"]
            with store.lock("lock") as second, store.at("below").lock("lock") as other:
                assert (first, second, other) == (True, False, True)
        if not store.traits.lock_expiry:
            self._check_shared_locks(store)
        with store.lock("lock") as again:
            assert again

    @staticmethod
    def _check_shared_locks(store: Store) -> None:
        with store.lock("missing", shared=True) as held:
            assert not held
        with (
            store.lock("lock", shared=True) as first,
            store.lock("lock", shared=True) as second,
            store.lock("lock") as third,
        ):
            assert (first, second, third) == (True, True, False)
        with store.lock("lock"), store.lock("lock", shared=True) as held:
            assert not held

    @pytest.mark.parametrize("key", UNSAFE)
    def test_no_name_leads_out_of_a_store(self, store: Store, key: str) -> None:
        reads: list[Callable[[], object]] = [
            lambda: store.at(key),
            lambda: store.read(key, limit=1),
        ]
        if key not in ("", "a/b"):
            reads += [lambda: store.open(key), lambda: store.stat(key)]
        _check_refused(reads)

    @pytest.mark.parametrize("key", [*UNSAFE, *UNUSUAL])
    def test_files_are_written_under_plain_names_only(self, store: Store, key: str) -> None:
        writes: list[Callable[[], object]] = [
            lambda: store.create(key, 1),
            lambda: store.create(key, 1, replace=True),
            lambda: store.publish(key, b"", replace=True),
        ]
        if key:
            writes.append(lambda: store.delete(key))
        _check_refused(writes)
        assert store.list() == []


def _check_refused(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        with pytest.raises(StoreError):
            call()
