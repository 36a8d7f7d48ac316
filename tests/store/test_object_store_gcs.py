"""Object stores in Google Cloud Storage: the conformance suite on the server of these tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from shardwise.ports.store import Store, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file, write_file
from tests.store.gcs_server import TOKEN, GcsServer

pytest.importorskip("obstore", reason="object stores need obstore")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[GcsServer]:
    with GcsServer(page=5) as server:
        yield server


@pytest.fixture
def store(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", TOKEN)
    url = f"gs://bucket/run-{next(_numbers)}?endpoint={server.url}&retry=5&part_mib=5"
    return open_store(url)


class TestGcs(StoreSuite):
    @pytest.fixture
    def store(self, store: Store) -> Store:
        return store


def test_a_large_file_is_uploaded_in_parts(store: Store, server: GcsServer) -> None:
    data = content(12_345_678)
    write_file(store, KEY, data)
    assert read_file(store, KEY) == data.tobytes()
    file = store.create("other", len(data))
    file.write_at(0, data)
    file.close()
    assert store.list() == [KEY]
    assert not server.bucket.uploads
