"""A server that does not answer is named in a warning, long before its requests fail."""

from __future__ import annotations

import logging
import re
import socket
import time
from unittest import mock

import pytest

import shardwise as sw
from shardwise.engine.data_reader import DataReader
from shardwise.errors import StoreUnavailableError
from shardwise.manifest.manifest import FileEntry
from shardwise.store import LocalStore
from shardwise.store.hdfs import HdfsFiles
from shardwise.store.object_clients import Client
from shardwise.store.object_store import ObjectStore, parse_object_url
from shardwise.store.outages import OutageWatch
from shardwise.store.remote_files import RemoteFileStore

URL = (
    "s3://bucket/run?endpoint=http://127.0.0.1:1&anonymous=true&region=us-east-1&retry=1&timeout=1"
)


def test_a_warning_names_server_reason_and_end_of_the_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = parse_object_url(URL)
    store = ObjectStore(url, Client(url, warning_seconds=0.1))
    for _ in range(2):
        with pytest.raises(sw.StoreError, match="does not answer"):
            store.list()
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    (said,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert said.startswith("s3://bucket/run?endpoint=http://127.0.0.1:1&")
    assert "check the endpoint and the network" in said
    assert re.search(r"repeated until \d\d:\d\d:\d\d \(the option retry=1 of the URL\)", said)


def test_a_silent_namenode_is_a_warning_and_then_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client of HDFS would wait without a bound."""
    pytest.importorskip("hdfs_native", reason="stores in HDFS need hdfs-native")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}"
        store = RemoteFileStore(HdfsFiles(url, seconds=0.4, warning_seconds=0.2), "/run")
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=f"{url}/run: HDFS has not answered"):
                store.list()
    (said,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert said.startswith(f"{url}/run: HDFS has not answered for 0.2 s. The request fails after")


def test_a_data_file_that_cannot_be_opened_in_an_outage_is_not_damaged() -> None:
    """`restore` skips damaged steps, and must not skip a step because of an outage."""
    files = mock.create_autospec(LocalStore, instance=True)
    files.open.side_effect = StoreUnavailableError("no answer")
    with pytest.raises(StoreUnavailableError):
        DataReader(files, FileEntry("r00000.safetensors", 0, 1, 0, 0, 0, 0))


def test_each_outage_is_reported_once_and_long_requests_are_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason, probes = "", 0

    def probe() -> str:
        nonlocal probes
        probes += 1
        return reason

    watch = OutageWatch(60.0, probe, seconds=0.05)

    def request(until: int) -> None:
        deadline = time.monotonic() + 20
        while probes < until and time.monotonic() < deadline:
            time.sleep(0.01)

    with watch.watch_request():
        request(2)
    assert not caplog.records
    for outage in (1, 2):
        reason, expected = "refused", probes + 1
        with watch.watch_request(), watch.watch_request():
            request(expected)
            time.sleep(0.2)
            assert probes == expected, "an outage that is reported is not probed again"
        assert len(caplog.records) == outage
        reason = ""
        with watch.watch_request():
            pass
