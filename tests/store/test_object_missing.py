"""Answers with the status 404, although the object or bucket exists, are not believed at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreUnavailableError
from shardwise.ports.store import Store, is_file, open_store
from tests.breadth import mostly_long
from tests.store.servers import moto  # noqa: F401 - a fixture
from tests.store.test_object_faults import (  # noqa: F401 - place and proxy are fixtures
    BEGIN,
    Place,
    place,
    proxy,
)
from tests.tools.fault_proxy import FaultKind, HttpFault
from tests.tools.watched_stores import store_with_own_clock


def read_through(store: Store, key: str) -> bytes:
    with closing(store.open(key)) as file:
        return bytes(file.view(0, file.size))


READS: dict[str, Callable[[Store], object]] = {
    "read": lambda store: store.read("key", limit=100) == b"content",
    "open": lambda store: read_through(store, "key") == b"content",
    "stat": lambda store: is_file(store.at("key")),
    "list": lambda store: store.list() == ["key"],
    "walk": lambda store: list(store.walk(10)) == ["key"],
}
NOT_FOUND = HttpFault(FaultKind.ANSWER, status=404, methods=("GET", "HEAD"), count=3)


@pytest.mark.parametrize("action", READS)
def test_what_was_just_written_is_looked_for_again(place: Place, action: str) -> None:  # noqa: F811
    store, now = store_with_own_clock(place.faulty(1, timeout=30))
    store.publish("key", b"content", replace=False)
    place.proxy.inject(NOT_FOUND)
    assert READS[action](store)
    assert 0 < now[0] < 1
    place.proxy.inject(replace(NOT_FOUND, index=1))
    assert READS[action](store)


def test_what_was_just_written_is_missing_after_ten_seconds(place: Place) -> None:  # noqa: F811
    store, now = store_with_own_clock(place.faulty(1, timeout=30), retry=60)
    store.publish("key", b"content", replace=True)
    open_store(place.direct(1)).delete("key")
    with pytest.raises(FileNotFoundError):
        store.read("key", limit=100)
    assert 10 < now[0] < 15
    assert not is_file(store.at("key"))
    assert now[0] < 15


def test_only_what_was_just_written_is_looked_for_again(place: Place) -> None:  # noqa: F811
    store, now = store_with_own_clock(place.faulty(1, timeout=30))
    store.publish("key", b"content", replace=True)
    with pytest.raises(FileNotFoundError):
        store.read("other", limit=100)
    store.delete("key")
    with pytest.raises(FileNotFoundError):
        store.read("key", limit=100)
    store.publish("key", b"content", replace=True)
    now[0] = 11
    place.proxy.inject(NOT_FOUND)
    with pytest.raises(FileNotFoundError):
        store.read("key", limit=100)
    with pytest.raises(sw.StoreError, match="404"):
        store.list()
    assert now[0] == 11


@pytest.mark.parametrize("replaces", [True, False])
def test_a_put_that_the_server_does_not_find_is_repeated(place: Place, replaces: bool) -> None:  # noqa: F811
    store, now = store_with_own_clock(place.faulty(1, timeout=30))
    missing = replace(NOT_FOUND, methods=("PUT",), path="/key")
    place.proxy.inject(missing)
    store.publish("key", b"content", replace=replaces)
    assert 0 < now[0] < 1
    assert open_store(place.direct(1)).read("key", limit=100) == b"content"
    place.proxy.inject(replace(missing, count=None))
    with pytest.raises(StoreUnavailableError, match="cannot write: the server says that it does"):
        store.publish("key", b"other", replace=True)
    assert now[0] > 10


@pytest.mark.parametrize(
    ("method", "path"),
    mostly_long(
        [("POST", "uploads="), ("PUT", "partNumber=1"), ("POST", "uploadId=")],
        [("POST", "uploads="), ("POST", "uploadId=")],
    ),
)
def test_an_upload_that_the_server_does_not_find(place: Place, method: str, path: str) -> None:  # noqa: F811
    """The request that begins it is repeated; later, the bytes are gone, and agents save again."""
    store, size = store_with_own_clock(place.faulty(1, timeout=30))[0], 6 << 20
    content = torch.arange(size, dtype=torch.int32).to(torch.uint8).numpy()

    def write() -> None:
        with closing(store.create("weights", size)) as file:
            file.write_at(0, content)
            file.commit()

    place.proxy.inject(replace(NOT_FOUND, count=1, methods=(method,), path=path))
    if path != BEGIN:
        with pytest.raises(StoreUnavailableError, match="does not find"):
            write()
        assert place.server.unfinished_uploads(place.direct(1)) == []
    write()
    assert open_store(place.direct(1)).read("weights", limit=size) == content.tobytes()
