"""obstore works with the Google Cloud Storage server of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.store.gcs_server import TOKEN, GcsServer

obstore = pytest.importorskip("obstore", reason="the tests of object stores need obstore")


@pytest.fixture
def server() -> Iterator[GcsServer]:
    with GcsServer(page=3) as server:
        yield server


@pytest.fixture
def bucket(server: GcsServer) -> Any:
    return client(server, TOKEN)


def client(server: GcsServer, token: str) -> Any:
    return obstore.store.GCSStore(
        "bucket",
        base_url=server.url,
        bearer_token=token,
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )


def test_objects_are_put_read_and_deleted(bucket: Any) -> None:
    obstore.put(bucket, "run/ä b", b"0123456789")
    assert obstore.get(bucket, "run/ä b").bytes() == b"0123456789"
    assert obstore.get_range(bucket, "run/ä b", start=3, end=6) == b"345"
    assert obstore.head(bucket, "run/ä b")["size"] == 10
    obstore.delete(bucket, "run/ä b")
    for missing in (obstore.get, obstore.head, obstore.delete):
        with pytest.raises(FileNotFoundError):
            missing(bucket, "run/ä b")


def test_of_eight_who_create_at_once_one_succeeds(bucket: Any) -> None:
    def create(number: int) -> bool:
        try:
            obstore.put(bucket, "manifest", b"%d" % number, mode="create")
        except obstore.exceptions.AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        created = list(pool.map(create, range(8)))
    assert sum(created) == 1
    assert obstore.get(bucket, "manifest").bytes() == b"%d" % created.index(True)


def test_an_object_is_replaced_only_in_the_expected_generation(bucket: Any) -> None:
    first = obstore.put(bucket, "it", b"one")
    obstore.put(bucket, "it", b"two", mode=first)
    with pytest.raises(obstore.exceptions.PreconditionError):
        obstore.put(bucket, "it", b"three", mode=first)
    assert obstore.get(bucket, "it").bytes() == b"two"


def test_large_objects_come_in_parts(bucket: Any, server: GcsServer) -> None:
    content = bytes(range(256)) * (50 << 10)  # 12.5 MiB
    obstore.put(bucket, "large", content, chunk_size=5 << 20)
    assert obstore.get(bucket, "large").bytes() == content
    with pytest.raises(obstore.exceptions.BaseError, match="EntityTooSmall"):
        obstore.put(bucket, "parts", content, chunk_size=1 << 20)
    assert not server.bucket.uploads  # obstore aborted the upload
    assert "parts" not in server.bucket.objects


def test_listings_come_in_pages(bucket: Any) -> None:
    names = [f"run/step_{step}/{name}" for step in range(4) for name in ("a", "b")]
    for name in [*names, "other"]:
        obstore.put(bucket, name, name.encode())
    listed = [each for page in obstore.list(bucket, "run") for each in page]
    assert [each["path"] for each in listed] == names
    assert [each["size"] for each in listed] == list(map(len, names))
    below = obstore.list_with_delimiter(bucket, "run")
    assert sorted(below["common_prefixes"]) == [f"run/step_{step}" for step in range(4)]


def test_other_credentials_are_refused(server: GcsServer) -> None:
    with pytest.raises(obstore.exceptions.UnauthenticatedError):
        obstore.put(client(server, "other"), "it", b"one")
