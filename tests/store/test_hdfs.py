"""Stores in a real HDFS: the conformance suite, and what is special."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.ports.store import open_store
from shardwise.testing.store_suite import KEY, content, read_file, write_file
from tests.store.hdfs_server import Hdfs, find_jars, running_hdfs
from tests.store.remote_files_suite import RemoteFilesSuite

pytest.importorskip("hdfs_native", reason="stores in HDFS need hdfs-native")
pytestmark = pytest.mark.long

_numbers = itertools.count()


@pytest.fixture(scope="module")
def hdfs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hdfs]:
    with running_hdfs(find_jars(request.config), tmp_path_factory.mktemp("hdfs")) as hdfs:
        yield hdfs


@pytest.fixture
def place(hdfs: Hdfs) -> str:
    return f"{hdfs.url}/runs/{next(_numbers)}"


class TestHdfs(RemoteFilesSuite):
    """The tests of every remote file system."""


def test_a_process_that_was_killed_leaves_nothing_that_stops_the_next_save(place: str) -> None:
    program = textwrap.dedent(f"""
        import os, signal
        from shardwise.ports.store import open_store
        from shardwise.testing.store_suite import KEY, content
        file = open_store({place!r}).create(KEY, 5000)
        file.write_at(0, content(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    store = open_store(place)
    assert store.list() == [KEY]
    store.delete(KEY)
    write_file(store, KEY, content(5000))
    assert read_file(store, KEY) == content(5000).tobytes()


def test_an_unreachable_namenode_is_an_error_within_seconds() -> None:
    with pytest.raises(StoreUnavailableError, match="Connection refused"):
        open_store("hdfs://127.0.0.1:1/run?retry=0").list()


def test_a_url_with_options_is_refused() -> None:
    with pytest.raises(StoreError, match="unknown option"):
        open_store("hdfs://127.0.0.1:1/run?user=me")


@pytest.mark.parametrize(
    ("answer", "error", "advice"),
    [
        ("SafeModeException: still starting", StoreUnavailableError, "check that its NameNode"),
        ("DSQuotaExceededException: the quota is exceeded", StoreError, "for example a quota"),
    ],
)
def test_the_advice_of_an_error_fits_its_cause(
    monkeypatch: pytest.MonkeyPatch, answer: str, error: type[Exception], advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(f"org.apache.hadoop.{answer}\\n\\tat org.apache.Line")

    monkeypatch.setattr("hdfs_native.Client", refuse)
    with pytest.raises(error, match=rf"{answer}; .*{advice}") as raised:
        open_store("hdfs://127.0.0.1:1/run?retry=0").list()
    assert type(raised.value) is error


def test_another_user_may_read_but_not_write(place: str, tmp_path: Path) -> None:
    store = open_store(place)
    write_file(store, KEY, content(5000))
    program = textwrap.dedent(f"""
        from shardwise.ports.store import open_store
        from shardwise.testing.store_suite import KEY, content, read_file, write_file
        store = open_store({place!r})
        assert read_file(store, KEY) == content(5000).tobytes()
        try:
            write_file(store, "other", content(10))
        except PermissionError as error:
            assert "Permission denied" in str(error), error
            print("refused")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "HADOOP_USER_NAME": "another"},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "refused\n", done.stderr
    write_file(store, "other", content(10))


def test_an_agent_continues_a_save_after_an_outage(hdfs: Hdfs, place: str, tmp_path: Path) -> None:
    memory = sw.Memory(dir=str(tmp_path), snapshot_every=1)
    with sw.Checkpointer(f"{place}?retry=5", memory=memory) as checkpointer:
        checkpointer.save(1, {"t": torch.ones(1000)})
        hdfs.namenode.kill()
        handle = checkpointer.save(2, {"t": torch.full((1000,), 2.0)})
        assert handle is not None
        deadline = time.monotonic() + 60
        while not handle.why_retrying() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert "Connection refused" in handle.why_retrying()
        hdfs.restart_namenode()
        handle.result(300.0)
    state = {"t": torch.zeros(1000)}
    with sw.Checkpointer(place, memory=None) as checkpointer:
        assert checkpointer.restore(state) == 2
    assert state["t"].tolist() == [2.0] * 1000


def test_a_server_that_hangs_is_an_error_and_its_files_are_there_afterwards(
    hdfs: Hdfs, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is bounded. The store is usable when the server goes on."""
    write_file(open_store(place), KEY, content(5000))
    monkeypatch.setattr("shardwise.parts.stores.hdfs.HdfsStore.request_timeout", 1.0)
    store = open_store(f"{place}?retry=0")
    assert store.list() == [KEY]
    hdfs.namenode.send_signal(signal.SIGSTOP)
    try:
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="has not answered for 1 s"):
                store.list()
    finally:
        hdfs.namenode.send_signal(signal.SIGCONT)
    assert read_file(store, KEY) == content(5000).tobytes()
