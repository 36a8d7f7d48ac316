"""Stores in file systems of fsspec: the conformance suite, and what is special."""

from __future__ import annotations

import errno
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.ports.store import Store, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, write_file
from tests.store.remote_files_suite import RemoteFilesSuite

fsspec = pytest.importorskip("fsspec", reason="these stores need fsspec")

_numbers = itertools.count()


@pytest.fixture
def place() -> Iterator[str]:
    place = f"memory://runs/{next(_numbers)}"
    yield place
    memory = fsspec.filesystem("memory")
    if memory.exists(place):
        memory.rm(place, recursive=True)


class TestInMemory(RemoteFilesSuite):
    """The tests of every remote file system."""


class TestInFiles(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.chdir("/")  # the paths of these URLs are relative
        return open_store(f"local:/{tmp_path}/store")


def test_a_directory_is_not_a_file(place: str) -> None:
    store = open_store(place)
    write_file(store.at("below"), KEY, content(5))
    with pytest.raises(StoreError, match="is a directory"):
        store.open("below")
    with pytest.raises(NotADirectoryError, match=f"a file is where.*below/{KEY}"):
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
    monkeypatch.setattr("shardwise.parts.stores.fsspec_store._TIME_KEYS", ())
    store = open_store(place)
    with pytest.raises(StoreError, match="does not tell when"), store.lock("lock"):
        pass


@pytest.mark.parametrize(
    ("error", "is_outage"),
    [
        (ConnectionResetError(errno.ECONNRESET, "reset"), True),
        (OSError("Socket is closed"), True),
        (OSError(errno.EHOSTUNREACH, "no route"), True),
        (EOFError("paramiko has its own errors"), True),
        (TypeError("an option of the file system is missing"), False),
        (OSError(errno.ENOSPC, "full"), False),
    ],
    ids=str,
)
def test_outages_are_told_from_other_errors_and_the_next_request_connects_anew(
    place: str, monkeypatch: pytest.MonkeyPatch, error: Exception, is_outage: bool
) -> None:
    """Agents try again after an outage only."""
    store = open_store(f"{place}?retry=0")
    connections: list[object] = []
    connect = fsspec.url_to_fs

    def connecting(*args: object, **options: object) -> object:
        connections.append(args)
        return connect(*args, **options)

    monkeypatch.setattr(fsspec, "url_to_fs", connecting)
    write_file(store, KEY, content(5))
    with monkeypatch.context() as broken:
        broken.setattr(type(fsspec.filesystem("memory")), "ls", Mock(side_effect=error))
        with pytest.raises(OSError, match=re.escape(str(error))) as raised:
            store.list()
    assert isinstance(raised.value, StoreUnavailableError) == is_outage
    assert store.list() == [KEY]
    assert len(connections) == 1 + is_outage
