"""A server that does not answer is named in a warning, long before its requests fail."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreUnavailableError
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.watched_stores import store_with_own_clock, with_own_clock

UNREACHABLE = "s3://bucket/run?endpoint=http://127.0.0.1:1&anonymous=true&region=us-east-1"


def unavailable(operation: str) -> None:
    raise StoreUnavailableError("no answer")


def test_a_warning_names_server_reason_and_end_of_the_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each outage has one warning, also if several operations fail."""
    store, _ = store_with_own_clock(f"{UNREACHABLE}&timeout=1&retry=0", retry=20)
    for _ in range(2):
        with pytest.raises(sw.StoreError, match="does not answer"):
            store.list()
    (said,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert said.startswith("s3://bucket/run?endpoint=http://127.0.0.1:1&")
    assert "check the endpoint and the network" in said
    assert re.search(r"repeated until \d\d:\d\d:\d\d \(the option retry=20 of the URL\)", said)


def test_whether_a_place_is_writable_is_unknown_in_an_outage(
    moto: Server,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Otherwise, a `Checkpointer` would ignore the snapshots in memory."""
    with FaultProxy(moto.endpoint) as proxy:
        url = moto.behind(proxy.url).new_url(retry="0")
        proxy.inject(HttpFault(FaultKind.ANSWER, status=503, methods=("PUT",), count=1000))
        with pytest.raises(StoreUnavailableError):
            sw.Checkpointer(url, memory=sw.Memory(dir=str(tmp_path)))


def test_a_silent_namenode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of HDFS would wait without a bound."""
    pytest.importorskip("hdfs_native", reason="stores in HDFS need hdfs-native")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr("shardwise.parts.stores.hdfs.HdfsStore.request_timeout", 0.4)
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match=f"{url}/run: HDFS has not answered"):
                sw.list_checkpoints(f"{url}/run?retry=0")


def test_a_data_file_that_cannot_be_opened_in_an_outage_is_not_damaged(tmp_path: Path) -> None:
    """`restore` skips damaged steps, and must not skip a step because of an outage."""
    values = torch.arange(1000)
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"t": values + step})
    found = torch.zeros_like(values)
    down = FaultyStore(tmp_path, Fault(0, unavailable, verbs=("open",)))
    with sw.Checkpointer(down, memory=None) as checkpointer:
        with pytest.raises(sw.StoreError, match="no answer"):
            checkpointer.restore({"t": found})
        assert checkpointer.restore({"t": found}) == 2
    assert torch.equal(found, values + 2)


def test_each_outage_is_reported_once_and_short_ones_are_not(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    left = [0]

    def fail(operation: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise StoreUnavailableError("no answer")

    flaky = FaultyStore(tmp_path, Fault(0, fail, verbs=("read",), sticky=True))
    store, _ = with_own_clock(flaky, 60)
    for down, reports in ((5, 0), (8, 1), (8, 2), (5, 2)):
        left[0] = down
        assert store.read("file", limit=10) == b"content"
        assert len(caplog.records) == reports
