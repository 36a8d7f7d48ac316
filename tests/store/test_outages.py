"""A server that does not answer is named in a warning, long before its requests fail."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from unittest import mock

import pytest

import shardwise as sw
from shardwise.engine.data_reader import DataReader
from shardwise.errors import StoreUnavailableError
from shardwise.manifest.layout import StoredFile
from shardwise.manifest.manifest import FileEntry
from shardwise.store import LocalStore, is_writable, open_store
from shardwise.store.object_store import ObjectStore
from shardwise.store.retry import Retry, RetryingStore


def test_a_warning_names_server_reason_and_end_of_the_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each outage has one warning, also if several operations fail."""
    url = "s3://bucket/run?endpoint=http://127.0.0.1:1&anonymous=true&region=us-east-1&timeout=1"
    store = RetryingStore(ObjectStore(url), Retry(1.0, 0.1))
    for _ in range(2):
        with pytest.raises(sw.StoreError, match="does not answer"):
            store.list()
    (said,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert said.startswith("s3://bucket/run?endpoint=http://127.0.0.1:1&")
    assert "check the endpoint and the network" in said
    assert re.search(r"repeated until \d\d:\d\d:\d\d \(the option retry=1 of the URL\)", said)


def test_whether_a_place_is_writable_is_unknown_in_an_outage() -> None:
    """Otherwise, a `Checkpointer` would ignore the snapshots in memory."""
    unreachable = "s3://bucket/run?endpoint=http://127.0.0.1:1&anonymous=true&retry=0"
    with pytest.raises(StoreUnavailableError):
        is_writable(open_store(unreachable))


def test_a_silent_namenode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of HDFS would wait without a bound."""
    pytest.importorskip("hdfs_native", reason="stores in HDFS need hdfs-native")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("shardwise.store.hdfs.HdfsStore.seconds", 0.4)
        store = open_store(f"{url}/run?retry=0")
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=f"{url}/run: HDFS has not answered"):
                store.list()


def test_a_data_file_that_cannot_be_opened_in_an_outage_is_not_damaged() -> None:
    """`restore` skips damaged steps, and must not skip a step because of an outage."""
    files = mock.create_autospec(LocalStore, instance=True)
    files.open.side_effect = StoreUnavailableError("no answer")
    with pytest.raises(StoreUnavailableError):
        DataReader(files, StoredFile.of_entry(FileEntry("r00000.safetensors", 0, 1, 0, 0, 0, 0)))


class Flaky(LocalStore):
    """A store that is down for some operations."""

    down = 0

    def read(self, key: str, *, limit: int) -> bytes:
        self.down -= 1
        if self.down >= 0:
            raise StoreUnavailableError("no answer")
        return super().read(key, limit=limit)


def test_each_outage_is_reported_once_and_short_ones_are_not(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    flaky = Flaky(tmp_path)
    flaky.publish("file", b"content", replace=True)
    store = RetryingStore(flaky, Retry(60.0, 10.0, lambda: now[0], sleep))
    for down, reports in ((5, 0), (8, 1), (8, 2), (5, 2)):
        flaky.down = down
        assert store.read("file", limit=10) == b"content"
        assert len(caplog.records) == reports
