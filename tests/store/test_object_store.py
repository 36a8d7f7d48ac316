"""Object stores: the conformance suite on servers, and what is their own."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import Store, abort_uploads, name_of, open_store, parent_of
from shardwise.kernel.store.store import Buffer
from shardwise.parts.stores import uploads
from shardwise.parts.stores.object_store import SMALLEST_WINDOW
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file
from tests.breadth import mostly_long
from tests.store.servers import (  # noqa: F401 - fixtures
    BUCKET,
    Server,
    free_ports,
    moto,
    rclone,
    s3_client,
    seaweedfs,
)
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault


class TestMoto(StoreSuite):
    @pytest.fixture
    def store(self, moto: Server) -> Store:  # noqa: F811
        return open_store(moto.new_url(retry="5"))


@pytest.mark.long
class TestSeaweedFs(StoreSuite):
    @pytest.fixture
    def store(self, seaweedfs: Server) -> Store:  # noqa: F811
        return open_store(seaweedfs.new_url())

    def test_stores_below_are_apart(self, store: Store) -> None:
        """SeaweedFS lists a prefix for some time after its last object has gone."""
        store.at("step-1").publish("a", b"1", replace=False)
        store.at("step-2").publish("a", b"2", replace=False)
        assert store.list() == ["step-1", "step-2"]
        store.at("step-1").delete("a")
        store.at("step-1").delete("")
        assert store.at("step-1").list() == []
        assert [name for name in store.list() if store.at(name).stat("a")] == ["step-2"]


PART = 5 << 20  # the smallest part that S3 allows
CHUNK = 1 << 20


def upload(store: Store, data: Buffer, order: Sequence[int], threads: int = 4) -> None:
    """Write an object in chunks, which begin in this order."""
    file = store.create(KEY, len(data))

    def write(index: int) -> None:
        chunk = data[index * CHUNK : (index + 1) * CHUNK].copy()
        file.write_at(index * CHUNK, chunk)
        chunk[:] = 0  # the caller uses its buffer again

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, order))
        file.commit()
    finally:
        file.close()


@pytest.mark.parametrize(
    "size",
    mostly_long([PART - 1, PART, PART + 1, 2 * PART, 3 * PART + 7], [PART, PART + 1, 3 * PART + 7]),
)
def test_objects_of_several_parts_are_written_and_read(moto: Server, size: int) -> None:  # noqa: F811
    url = moto.new_url(part_mib="5")
    store, data = open_store(url), content(size)
    upload(store, data, range(-(-size // CHUNK)))
    assert read_file(store, KEY) == data.tobytes()
    assert moto.unfinished_uploads(url) == []


def test_chunks_of_an_upload_may_come_roughly_in_order(moto: Server) -> None:  # noqa: F811
    """Later chunks wait in memory; the next chunk never waits."""
    store = open_store(moto.new_url(part_mib="5"))
    data = content(30 * CHUNK)
    order = [index ^ 3 for index in range(28)] + [29, 28]
    upload(store, data, order)
    assert read_file(store, KEY) == data.tobytes()


def test_chunks_in_reverse_order_are_written_or_refused_at_once(moto: Server) -> None:  # noqa: F811
    """They are written if they fit into the memory of an upload. No chunk waits for long."""
    store = open_store(moto.new_url(part_mib="5"))
    data = content(SMALLEST_WINDOW)
    upload(store, data, list(reversed(range(len(data) // CHUNK))), threads=1)
    assert read_file(store, KEY) == data.tobytes()
    file = store.create("other", len(data) + 2 * CHUNK)
    begin = time.monotonic()
    try:
        with pytest.raises(StoreError, match="come too early, because 34603008 bytes before them"):
            file.write_at(len(data) + CHUNK, content(CHUNK))
    finally:
        file.close()
    assert time.monotonic() - begin < 10
    assert store.list() == [KEY]


def test_an_upload_that_is_not_committed_leaves_nothing(moto: Server) -> None:  # noqa: F811
    url = moto.new_url(part_mib="5")
    store = open_store(url)
    for written in (0, 1, 12):
        file = store.create(KEY, 20 * CHUNK)
        for index in range(written):
            file.write_at(index * CHUNK, content(CHUNK))
        file.close()
    file = store.create(KEY, 20 * CHUNK)
    file.write_at(0, content(CHUNK))
    with pytest.raises(StoreError, match=f"byte {CHUNK} of {20 * CHUNK} was not written"):
        file.commit()
    file.close()
    assert store.list() == []
    assert moto.unfinished_uploads(url) == []


def test_each_byte_is_written_once(moto: Server) -> None:  # noqa: F811
    file = open_store(moto.new_url(part_mib="5")).create(KEY, 20 * CHUNK)
    try:
        file.write_at(CHUNK, content(CHUNK))
        with pytest.raises(StoreError, match="written twice"):
            file.write_at(CHUNK, content(CHUNK))
    finally:
        file.close()


def test_a_server_that_ignores_conditions_is_refused(rclone: Server) -> None:  # noqa: F811
    store = open_store(rclone.new_url())
    with pytest.raises(StoreError, match="single_writer=true"):
        store.publish("manifest.json", b"1", replace=False)
    assert "manifest.json" not in store.list()


def test_a_single_writer_may_use_a_server_that_ignores_conditions(rclone: Server) -> None:  # noqa: F811
    store = open_store(rclone.new_url(single_writer="true"))
    store.publish("manifest.json", b"1", replace=False)
    with pytest.raises(FileExistsError):
        store.publish("manifest.json", b"2", replace=False)
    assert store.read("manifest.json", limit=1) == b"1"


def test_a_publication_whose_answer_is_lost_succeeds(moto: Server) -> None:  # noqa: F811
    """The put is repeated, is refused then, and the object is read back."""
    with FaultProxy(moto.endpoint) as proxy:
        server = Server("s3", proxy.url)
        store = open_store(server.new_url(retry="5"))
        store.publish("first", b"1", replace=False)  # with the probe
        proxy.inject(HttpFault(FaultKind.LOSE_ANSWER, methods=("PUT",)))
        store.publish("manifest.json", b"mine", replace=False)
        assert store.read("manifest.json", limit=10) == b"mine"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run?colour=red", "unknown option 'colour'"),
        ("s3://bucket/run?secret_access_key=x", "looks like a secret"),
        ("s3://user:password@bucket/run", "must not contain user names or passwords"),
        ("s3://", "expected s3://HOST/PATH"),
        ("s3://bucket/a/../b", "'..' component"),
        ("s3://bucket/run?anonymous=maybe", "expected true or false"),
        ("s3://bucket/run?timeout=soon", "expected a number"),
        ("s3://bucket/run?endpoint=http://192.0.2.1:9000", "not encrypted"),
        ("s3://bucket/run?profile=absent", "profile"),
        ("ftp9://bucket/run", "unknown scheme"),
    ],
)
def test_wrong_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=re.escape(message)):
        open_store(url).list()


def test_a_url_is_opened_again_by_its_name(moto: Server) -> None:  # noqa: F811
    store = open_store(moto.new_url(region="us-east-1")).at("a b%?c")
    again = open_store(str(store))
    again.publish("x", b"1", replace=True)
    assert store.list() == ["x"]
    assert (name_of(again), str(parent_of(again))) == ("a b%?c", str(parent_of(store)))


def test_missing_buckets_and_servers_are_named() -> None:
    (port,) = free_ports(1)
    store = open_store(f"s3://bucket/run?endpoint=http://127.0.0.1:{port}&retry=0.5&timeout=1")
    with pytest.raises(StoreError, match="does not answer now: check the endpoint"):
        store.list()


def test_a_bucket_that_does_not_exist_is_named(moto: Server) -> None:  # noqa: F811
    store = open_store(f"s3://absent-bucket/run?endpoint={moto.endpoint}")
    with pytest.raises(StoreError, match="the bucket does not exist"):
        store.list()
    with pytest.raises(StoreError, match="the bucket does not exist"):
        store.publish("a", b"", replace=True)


def test_a_forked_process_is_told_to_start_otherwise(moto: Server) -> None:  # noqa: F811
    url = moto.new_url()
    open_store(url).list()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            open_store(url).list()
        except StoreError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert b"was forked" in pipe.read()
    os.waitpid(pid, 0)


def test_abandoned_uploads_are_aborted_at_the_next_start(moto: Server) -> None:  # noqa: F811
    """As a killed process leaves them."""
    url = moto.new_url()
    prefix = open_store(url).store.url.path
    client = s3_client(moto.endpoint)
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/step-00000001/r00000.safetensors")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}-of-others/file")
    with sw.Checkpointer(url, memory=None):
        pass
    assert moto.unfinished_uploads(url) == [f"{prefix}-of-others/file"]
    assert abort_uploads(open_store(f"{url.replace('/run?', '/run-of-others?')}"), 0) == 1


def test_only_idle_uploads_are_aborted(moto: Server) -> None:  # noqa: F811
    """moto says that all uploads began in 2010."""
    store = open_store(moto.new_url())
    key = f"{store.store.url.path}/file"
    s3_client(moto.endpoint).create_multipart_upload(Bucket=BUCKET, Key=key)
    assert abort_uploads(store, 1e9) == 0
    assert abort_uploads(store, 60) == 1


def test_an_old_upload_whose_writer_lives_is_kept(moto: Server) -> None:  # noqa: F811
    """As if another job opened the root meanwhile. For moto, the upload began in 2010."""
    store, data = open_store(moto.new_url(part_mib="5")), content(20 * CHUNK)
    file = store.create(KEY, len(data))
    try:
        for low in range(0, 12 * CHUNK, CHUNK):
            file.write_at(low, data[low : low + CHUNK])
        parts = parts_of_upload(moto, f"{store.store.url.path}/{KEY}")
        assert abort_uploads(store) == 0
        for low in range(12 * CHUNK, len(data), CHUNK):
            file.write_at(low, data[low : low + CHUNK])
        file.commit()
    finally:
        file.close()
    assert len(parts) == 2
    assert read_file(store, KEY) == data.tobytes()


def test_an_upload_whose_last_part_is_old_is_aborted(moto: Server) -> None:  # noqa: F811
    # moto answers with status 500 to a part of an upload that was aborted.
    store = open_store(moto.new_url(part_mib="5", retry="0"))
    file = store.create(KEY, 20 * CHUNK)
    try:
        file.write_at(0, content(12 * CHUNK))
        parts = parts_of_upload(moto, f"{store.store.url.path}/{KEY}")
        parts[0].last_modified -= timedelta(hours=3)
        assert abort_uploads(store) == 0, "one part is new"
        parts[1].last_modified -= timedelta(hours=2)
        assert abort_uploads(store) == 1
        file.write_at(12 * CHUNK, content(8 * CHUNK))
        with pytest.raises(StoreError, match=r"the upload ended on the server|Server Error"):
            file.commit()
    finally:
        file.close()


def parts_of_upload(moto: Server, key: str) -> list[Any]:  # noqa: F811
    """Return moto's records of the first two parts of an upload, once it has them."""
    from moto.s3.models import s3_backends

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        uploads = s3_backends["123456789012"]["aws"].buckets[BUCKET].multiparts.values()
        found = [upload for upload in uploads if upload.key_name == key and len(upload.parts) == 2]
        if found:
            return list(found[0].parts.values())
        time.sleep(0.02)
    raise TimeoutError(f"{key} has fewer than two parts")


@pytest.mark.long
def test_idle_uploads_are_told_by_the_clock_of_the_server(seaweedfs: Server) -> None:  # noqa: F811
    store = open_store(seaweedfs.new_url())
    client, key = s3_client(seaweedfs.endpoint), f"{store.store.url.path}/file"
    upload = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    place = {"Bucket": BUCKET, "Key": key, "UploadId": upload}
    assert uploads.abort_uploads(store.store._client, key, idle_seconds=60) == 0
    time.sleep(7)
    client.upload_part(**place, PartNumber=1, Body=b"a")
    assert uploads.abort_uploads(store.store._client, key, idle_seconds=6) == 0
    time.sleep(7)
    assert uploads.abort_uploads(store.store._client, key, idle_seconds=6) == 1


def test_uploads_of_other_keys_with_the_same_beginning_are_kept(moto: Server) -> None:  # noqa: F811
    """An upload aborts earlier ones of its own key, which a killed process may have left."""
    url = moto.new_url(part_mib="5")
    store, client = open_store(url), s3_client(moto.endpoint)
    for key in (KEY, f"{KEY}.index"):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{store.store.url.path}/{key}")
    upload(store, content(6 * CHUNK), range(6))
    assert moto.unfinished_uploads(url) == [f"{store.store.url.path}/{KEY}.index"]
    assert abort_uploads(store, 0) == 1


def test_an_option_bounds_the_requests_of_an_upload(moto: Server) -> None:  # noqa: F811
    with FaultProxy(moto.endpoint, bytes_per_second=100e6) as proxy:
        store = open_store(moto.behind(proxy.url).new_url(part_mib="5", requests="2"))
        upload(store, content(6 * PART), range(6 * PART // CHUNK))
        assert proxy.max_concurrent_requests == 2


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[str]:
    """A web server of the files in a directory, with ranges and without listings."""
    from aiohttp import web

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_static("/", tmp_path)
    runner = web.AppRunner(app)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield "http://{}:{}".format(*runner.addresses[0])
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)
    loop.close()


def test_a_checkpoint_is_loaded_from_a_web_server(web_server: str, tmp_path: Path) -> None:
    saved = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    sw.save(tmp_path / "run", {"a": saved})
    loaded = {"a": torch.zeros(3 << 20, dtype=torch.uint8)}
    sw.load(f"{web_server}/run", loaded)
    assert torch.equal(loaded["a"], saved)
    with pytest.raises(sw.StoreError, match="can only be read"):
        sw.save(f"{web_server}/other", loaded)
