"""Object stores in Azure: the conformance suite on Azurite, and faults of the network."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.ports.store import Store, exists, open_store
from shardwise.testing.store_suite import KEY, StoreSuite, content, read_file
from tests.store.azurite_server import CONTAINER, AzureServer, azurite  # noqa: F401 - a fixture
from tests.store.test_object_faults import KINDS, REQUESTS, Place, check_one_fault
from tests.tools.agents import end_agents
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault
from tests.tools.waiting import wait_until

pytestmark = pytest.mark.long

CHUNK = 1 << 20


@pytest.fixture
def url(azurite: AzureServer) -> str:  # noqa: F811
    return azurite.new_url(part_mib="5", retry="5")


class TestAzurite(StoreSuite):
    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)


@pytest.fixture(scope="module")
def proxy(azurite: AzureServer) -> Iterator[FaultProxy]:  # noqa: F811
    logger = logging.getLogger("shardwise")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with FaultProxy(azurite.origin) as proxy:
        yield proxy
    logger.setLevel(level)


@pytest.fixture
def place(azurite: AzureServer, proxy: FaultProxy) -> Place:  # noqa: F811
    proxy.clear()
    path = azurite.new_url().partition("?")[0].split("/", 3)[3]
    return Place(azurite, proxy, path)


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"t": torch.randint(0, 256, (12 << 20,), dtype=torch.uint8, generator=generator)}


def test_checkpoints_are_saved_kept_and_restored(azurite: AzureServer, url: str) -> None:  # noqa: F811
    with sw.Checkpointer(f"{url}&grace_seconds=0", memory=None, keep=sw.Keep(last=2)) as saver:
        for step in (1, 2, 3):
            saver.save(step, state_of(step))
        assert saver.steps() == [2, 3]
    target = {"t": torch.zeros(12 << 20, dtype=torch.uint8)}
    with sw.Checkpointer(url, memory=None) as restorer:
        assert restorer.restore(target) == 3
    assert torch.equal(target["t"], state_of(3)["t"])
    sw.load(url, target, step=2)
    assert torch.equal(target["t"], state_of(2)["t"])
    sw.open(url, step=2).verify()
    assert azurite.unfinished_uploads(url) == []
    steps = {key.partition("/")[0] for key in azurite.keys(url)}
    assert steps == {"run.json", "step-00000002", "step-00000003", "telemetry"}


@pytest.mark.parametrize("reverse", [False, True])
def test_a_large_object_is_uploaded_in_parts(
    azurite: AzureServer,  # noqa: F811
    url: str,
    reverse: bool,
) -> None:
    store, data = open_store(url), content(30 * CHUNK + 7)
    file = store.create(KEY, len(data))
    order = range(0, len(data), CHUNK)
    try:
        with ThreadPoolExecutor(1 if reverse else 4) as pool:
            starts = reversed(order) if reverse else order
            list(pool.map(lambda low: file.write_at(low, data[low : low + CHUNK]), starts))
        file.commit()
    finally:
        file.close()
    assert read_file(store, KEY) == data.tobytes()
    assert azurite.unfinished_uploads(url) == []


def test_an_upload_that_is_not_committed_leaves_nothing(azurite: AzureServer, url: str) -> None:  # noqa: F811
    store = open_store(url)
    file = store.create(KEY, 20 * CHUNK)
    file.write_at(0, content(12 * CHUNK))
    # A part that is under way would arrive after the end of the upload.
    wait_until(lambda: azurite.uncommitted_blocks(f"{store.store.url.path}/{KEY}") == 2)
    assert len(azurite.unfinished_uploads(url)) == 1
    assert store.list() == []
    assert not exists(store)
    file.close()
    assert store.list() == []
    assert azurite.unfinished_uploads(url) == []


def test_a_failed_upload_keeps_the_object_that_it_would_replace(url: str) -> None:
    store, data = open_store(url), content(6 * CHUNK)
    for is_committed in (True, False):
        file = store.create(KEY, len(data), replace=True)
        try:
            file.write_at(0, data if is_committed else data[:CHUNK] + 1)
            if is_committed:
                file.commit()
        finally:
            file.close()
    assert read_file(store, KEY) == data.tobytes()


def test_of_eight_writers_one_wins_although_answers_are_lost(place: Place) -> None:
    lost = HttpFault(FaultKind.LOSE_ANSWER, count=6, methods=("PUT",), path="/manifest")
    place.proxy.inject(lost)

    def publish(number: int) -> bool:
        try:
            open_store(place.faulty(1)).publish("manifest.json", b"%d" % number, replace=False)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        published = list(pool.map(publish, range(8)))
    assert sum(published) == 1
    winner = b"%d" % published.index(True)
    assert open_store(place.direct(1)).read("manifest.json", limit=100) == winner


CASES = [
    (operation, kind, index)
    for operation, count in REQUESTS.items()
    for kind in KINDS
    for index in range(count)
]


@pytest.mark.parametrize(("operation", "kind", "index"), CASES[::7])
def test_one_request_fails(place: Place, operation: str, kind: str, index: int) -> None:
    check_one_fault(place, operation, kind, index)


def test_a_container_that_does_not_exist_is_named(azurite: AzureServer) -> None:  # noqa: F811
    store = open_store(f"az://absent/run?endpoint={azurite.endpoint}")
    for work in (store.list, lambda: store.publish("a", b"", replace=True)):
        with pytest.raises(StoreError, match="the container does not exist"):
            work()


def test_wrong_and_missing_credentials_are_told(
    azurite: AzureServer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(PermissionError, match="denies access"):
        open_store(azurite.new_url(anonymous="true")).publish("a", b"", replace=True)
    with pytest.raises(PermissionError, match="denies access"):
        open_store(azurite.new_url(anonymous="true")).list()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    with pytest.raises(PermissionError, match="denies access"):
        open_store(azurite.new_url()).list()
    monkeypatch.undo()
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    assert open_store(azurite.new_url(account=azurite.account)).list() == []
    with pytest.raises(StoreError, match="account"):
        open_store(azurite.new_url()).list()


@pytest.mark.parametrize("permissions", ["racwdl", "rl"])
def test_a_shared_access_signature_is_enough(
    azurite: AzureServer,  # noqa: F811
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    permissions: str,
) -> None:
    sw.save(url, state_of(1))
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", azurite.access_signature(permissions))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    target = {"t": torch.zeros(12 << 20, dtype=torch.uint8)}
    sw.load(url, target)
    assert torch.equal(target["t"], state_of(1)["t"])
    if "w" in permissions:
        sw.save(url, state_of(2), overwrite=True)
        sw.load(url, target)
        assert torch.equal(target["t"], state_of(2)["t"])
    else:
        with pytest.raises(sw.StoreError, match="denies access"):
            sw.save(url, state_of(2), overwrite=True)
        sw.load(url, target)
        assert torch.equal(target["t"], state_of(1)["t"])


def test_the_endpoint_may_come_from_the_environment(
    azurite: AzureServer,  # noqa: F811
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sw.save(url, {"a": torch.ones(3)})
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azurite.endpoint)
    place = url.partition("?")[0]
    assert "manifest.json" in open_store(f"{place}?allow_http=true").list()
    with pytest.raises(StoreError, match="the endpoint is not encrypted"):
        open_store(place).list()


def test_agents_upload_and_restore(url: str, tmp_path: Path) -> None:
    place, memory = f"{url}&grace_seconds=0", sw.Memory(dir=str(tmp_path / "shm"))
    try:
        with sw.Checkpointer(place, memory=memory, keep=sw.Keep(last=2)) as saver:
            for step in (1, 2, 3):
                handle = saver.save(step, state_of(step))
                assert handle is not None
                handle.result(60)
            saver.close()
            assert saver.steps() == [2, 3]
    finally:
        end_agents(tmp_path / "shm")
    target = {"t": torch.zeros(12 << 20, dtype=torch.uint8)}
    with sw.Checkpointer(url, memory=None) as restorer:
        assert restorer.restore(target) == 3
    assert torch.equal(target["t"], state_of(3)["t"])
