"""Runs whose root is an object store: agents and trainers die, the store goes away or refuses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import StoreUnavailableError
from tests.breadth import mostly_long
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.agents import signal_agents, until
from tests.tools.fault_proxy import FaultKind, FaultProxy, HttpFault
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.gang import Gang

LOCK_SECONDS = 3.0
SECONDS = 60.0
SIZE = 6 << 20  # more than one part


@pytest.fixture
def proxy(moto: Server) -> Iterator[FaultProxy]:  # noqa: F811
    with FaultProxy(moto.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url(moto: Server, proxy: FaultProxy) -> str:  # noqa: F811
    """The URL of a root that nobody has used, through the proxy."""
    options = {"retry": "0.5", "lock_seconds": f"{LOCK_SECONDS:g}", "part_mib": "5"}
    return Server("s3", proxy.url).new_url(**options)


def opened(url: str, shm: Path, **options: object) -> sw.Checkpointer:
    memory = sw.Memory(dir=str(shm), wait=20.0)
    return sw.Checkpointer(url, **{"memory": memory, **options})  # type: ignore[arg-type]


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"t": torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=generator)}


def assert_restores(
    url: str,
    step: int,
    shm: Path | None = None,
    source: str = "storage",
    *,
    being_saved: int | None = None,
) -> None:
    """Restore the newest step, and compare all bytes.

    Args:
        being_saved: a newer step that an agent may commit at any moment.
    """
    state = state_of(0)
    options = {"memory": None} if shm is None else {}
    with opened(url, shm or Path("/nowhere"), **options) as checkpointer:
        restored = checkpointer.restore(state)
        assert restored in (step, being_saved)
        report = checkpointer.last_restore
    assert restored is not None
    assert report is not None
    assert report.source == source
    assert torch.equal(state["t"], state_of(restored)["t"])


def puts(proxy: FaultProxy) -> list[str]:
    """Return the paths of the data that was sent to the server."""
    return [r.path for r in proxy.requests if r.method == "PUT" and ".safetensors" in r.path]


def keys_below(url: str, server: Server) -> list[str]:
    """Return the keys of a root, without what need not be there: hints and telemetry."""
    keys = server.keys(url)
    return [key for key in keys if not key.startswith("nodes/") and "telemetry" not in key]


def test_agents_upload_retain_and_restore(
    moto: Server,  # noqa: F811
    proxy: FaultProxy,
    url: str,
    shm: Path,
) -> None:
    with opened(url, shm, keep=sw.Keep(last=2)) as checkpointer:
        for step in (1, 2, 3):
            signal_agents(shm, signal.SIGSTOP)
            handle = checkpointer.save(step, state_of(step))
            assert handle is not None
            time.sleep(0.2)
            assert not any(f"step-{step:08d}" in path for path in puts(proxy))
            signal_agents(shm, signal.SIGCONT)
            handle.result(SECONDS)
        checkpointer.close()
        assert checkpointer.steps() == [2, 3]
    assert_restores(url, 3)
    kept = [key for key in keys_below(url, moto) if not key.startswith("step-00000001/")]
    assert sorted(key.partition("/")[0] for key in kept) == [
        "run.json",
        *["step-00000002"] * 2,
        *["step-00000003"] * 2,
    ]
    other = url.replace("/run?", "/other?")
    state = state_of(0)
    with opened(other, shm, memory=None, start_from=url) as checkpointer:
        assert checkpointer.restore(state) == 3
    assert torch.equal(state["t"], state_of(3)["t"])


def test_an_outage_is_retried_and_told_of(proxy: FaultProxy, url: str, shm: Path) -> None:
    with opened(url, shm) as checkpointer:
        first = checkpointer.save(1, state_of(1))
        assert first is not None
        first.result(SECONDS)
        with proxy.outage():
            started = time.monotonic()
            handle = checkpointer.save(2, state_of(2))
            assert handle is not None
            assert time.monotonic() - started < 20.0, "training waits for no storage"
            until(handle.why_retrying, SECONDS)
            with pytest.raises(TimeoutError, match=r"the agent tries again: .*does not answer"):
                handle.result(0.1)
            (run,) = sw.NodeAgent(shm).status().runs
            newest = run.snapshots[-1]
            assert (newest.step, newest.persist.state) == (2, "under way")
            assert "the agent tries again" in newest.persist.failure
        handle.result(SECONDS)
        assert handle.why_retrying() == ""
    assert_restores(url, 2)


@pytest.mark.parametrize(
    ("method", "path"),
    mostly_long([("PUT", "partNumber="), ("POST", "uploadId=")], [("POST", "uploadId=")]),
)
def test_an_upload_that_the_server_does_not_find_is_sent_again(
    proxy: FaultProxy, url: str, shm: Path, method: str, path: str
) -> None:
    fault = HttpFault(FaultKind.ANSWER, status=404, methods=(method,), path=path)
    proxy.inject(fault)
    with opened(url, shm) as checkpointer:
        handle = checkpointer.save(1, state_of(1))
        assert handle is not None
        handle.result(SECONDS)
    assert any(each.fault is fault for each in proxy.requests)
    assert_restores(url, 1)


def test_a_step_that_cannot_be_read_in_an_outage_is_not_taken_for_damaged(
    proxy: FaultProxy, url: str
) -> None:
    """Otherwise a restore would silently continue from an older step."""
    with opened(url, Path("/nowhere"), memory=None) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_of(step))
    proxy.clear()
    with opened(url, Path("/nowhere"), memory=None) as checkpointer:
        fault = HttpFault(
            FaultKind.RESET, count=None, methods=("GET",), path="step-00000002/manifest"
        )
        proxy.inject(fault)
        with pytest.raises(StoreUnavailableError, match="does not answer"):
            checkpointer.restore(state_of(0))
        assert any(each.fault is fault for each in proxy.requests)
        proxy.clear()
        state = state_of(0)
        assert checkpointer.restore(state) == 2
    assert torch.equal(state["t"], state_of(2)["t"])


def test_a_restart_in_an_outage_waits_as_long_as_the_url_says_and_loses_nothing(
    proxy: FaultProxy, url: str, shm: Path, tmp_path: Path
) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=1)
    checkpointer = opened(url, shm, memory=memory, save_every=100)
    with proxy.outage():
        handle = checkpointer.save(7, state_of(7))
        assert handle is not None
        handle.committed(SECONDS)
        checkpointer.close(wait=False)
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError, match="memory of this node keeps step 7"):
            opened(url.replace("retry=0.5", "retry=1"), shm)
        assert 0.5 < time.monotonic() - started < 20.0
        (snapshot,) = shm.glob("shardwise-*/runs/*/step-00000007-*")
        state = state_of(0)
        with opened(str(tmp_path / "other"), shm, start_from=snapshot) as other:
            assert other.restore(state) == 7
        assert torch.equal(state["t"], state_of(7)["t"])
    assert_restores(url, 7, shm, "memory")


def test_an_agent_uploads_to_the_endpoint_of_the_training(
    moto: Server,  # noqa: F811
    tmp_path: Path,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another run, without the endpoint in its environment, has started the agent."""
    state = {"t": torch.arange(1000)}
    memory = sw.Memory(dir=str(shm))
    with sw.Checkpointer(tmp_path / "run", memory=memory) as first:
        first.save(1, state)
        url = moto.new_url()
        monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
        bare = url.partition("?")[0]
        with sw.Checkpointer(bare, memory=memory) as second:
            handle = second.save(1, state)
            assert handle is not None
            handle.result(60.0)
    assert any(key.startswith("step-00000001/") for key in moto.keys(url))
    loaded = {"t": torch.zeros(1000, dtype=torch.int64)}
    sw.load(bare, loaded)
    assert torch.equal(loaded["t"], state["t"])


@pytest.mark.long  # test_an_outage_is_retried_and_told_of does so with a later save
def test_the_first_save_does_not_wait_for_the_storage(
    moto: Server,  # noqa: F811
    proxy: FaultProxy,
    url: str,
    shm: Path,
) -> None:
    patient = url.replace("retry=0.5", "retry=60")
    with opened(patient, shm) as checkpointer:
        with proxy.outage():
            started = time.monotonic()
            handle = checkpointer.save(1, state_of(1))
            assert handle is not None
            assert time.monotonic() - started < 20.0, "training waits for no storage"
        handle.result(SECONDS)
    assert_restores(url, 1)


@pytest.mark.parametrize(
    "at",
    [
        11,
        *(pytest.param(i, marks=pytest.mark.long) for i in range(16) if i != 11),
    ],
)
@pytest.mark.timeout(180)
def test_an_agent_is_killed_at_a_request_and_the_next_one_goes_on(
    moto: Server,  # noqa: F811
    proxy: FaultProxy,
    url: str,
    shm: Path,
    at: int,
) -> None:
    with opened(url, shm) as checkpointer:
        first = checkpointer.save(1, state_of(1))
        assert first is not None
        first.result(SECONDS)
        agent = sw.NodeAgent(shm).status().process
        assert agent is not None
        hang = HttpFault(FaultKind.HANG, index=at, path="step-00000002")
        proxy.inject(hang)
        handle = checkpointer.save(2, state_of(2))
        assert handle is not None
        until(lambda: handle.done() or any(r.fault == hang for r in proxy.requests), SECONDS)
        os.kill(agent, signal.SIGKILL)
        proxy.clear()  # the fault may not have hit the agent, and is not for the restore
        step = 2 if handle.done() else checkpointer.latest() or 0
        assert_restores(url, step, being_saved=2)  # the next agent may commit it meanwhile
        handle.result(SECONDS)
    assert_restores(url, 2)
    time.sleep(LOCK_SECONDS + 1.1)  # the server's times are in whole seconds
    assert_restores(url, 2)
    steps = sorted(key.partition("/")[0] for key in keys_below(url, moto))
    assert steps == ["run.json", *["step-00000001"] * 2, *["step-00000002"] * 2]
    assert moto.unfinished_uploads(url) == []


def save_and_die(url: str, step: int, at: int | None) -> list[str]:
    """Save a step in this process, which dies at a store operation; return the operations."""
    fault = Fault(at)
    store = FaultyStore(url, fault)
    with sw.Checkpointer(store, memory=None) as checkpointer:
        checkpointer.save(step, state_of(step), overwrite=step > 1)
    return fault.operations


@pytest.mark.parametrize(
    "stride", [40, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.timeout(300)
def test_a_trainer_is_killed_while_it_saves(
    moto: Server,  # noqa: F811
    gang: Gang,
    stride: int,
) -> None:
    url = moto.new_url(lock_seconds=f"{LOCK_SECONDS:g}", part_mib="5")
    (operations,) = gang.run(save_and_die, url, 1, None, world=1)
    assert {"create", "write_at", "commit", "publish"} <= {o.split()[0] for o in operations}
    step = 2
    for at in range(0, len(operations), stride):
        (outcome,) = gang.run_outcomes(save_and_die, url, step, at, world=1)
        if outcome.kind != "died":
            break
        with sw.Checkpointer(url, memory=None) as checkpointer:
            newest = checkpointer.latest() or 0
        assert newest in (step - 1, step), operations[at]
        assert_restores(url, newest)
        if newest < step:
            gang.run(save_and_die, url, step, None, world=1)
        step += 1
    time.sleep(LOCK_SECONDS + 1.1)
    assert_restores(url, step - 1)
    found = [key.partition("/")[0] for key in keys_below(url, moto)]
    assert found == ["run.json", *sorted([f"step-{each:08d}" for each in range(1, step)] * 2)]


@pytest.mark.long  # as tests/multirank/test_object_stores.py, with other processes
def test_of_eight_jobs_that_save_a_step_one_wins_and_the_others_are_told(
    moto: Server,  # noqa: F811
) -> None:
    url, start = moto.new_url(), Barrier(8)

    def attempt(number: int) -> str:
        start.wait()
        try:
            sw.save(url, state_of(number), group=sw.SoloGroup())
        except sw.CheckpointExistsError:
            return "told"
        return "won"

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(attempt, range(8)))
    assert sorted(ended) == ["told"] * 7 + ["won"]
    state = state_of(100)
    sw.load(url, state)
    assert torch.equal(state["t"], state_of(ended.index("won"))["t"])
    assert len(keys_below(url, moto)) == 2


def test_without_permission_to_delete_nothing_is_lost(
    proxy: FaultProxy, url: str, shm: Path
) -> None:
    checkpointer = opened(url, shm, keep=sw.Keep(last=1))
    first = checkpointer.save(1, state_of(1))
    assert first is not None
    first.result(SECONDS)
    proxy.inject(
        HttpFault(
            FaultKind.ANSWER, count=None, methods=("POST", "DELETE"), path="delete", status=403
        )
    )
    second = checkpointer.save(2, state_of(2))
    assert second is not None
    second.result(SECONDS)
    with pytest.raises(sw.StoreError, match="cannot delete: the server denies access"):
        checkpointer.close()
    assert_restores(url, 2)
    for step in (1, 2):
        sw.open(url, step=step).verify()


@pytest.mark.parametrize("on_failure", mostly_long(["raise", "warn"], ["warn"]))
def test_refused_credentials_are_told_of_and_lose_nothing(
    proxy: FaultProxy, url: str, shm: Path, on_failure: str
) -> None:
    checkpointer = opened(url, shm, on_failure=on_failure)
    first = checkpointer.save(1, state_of(1))
    assert first is not None
    first.result(SECONDS)
    refuse = HttpFault(
        FaultKind.ANSWER, count=None, methods=("PUT", "POST"), path="step-", status=403
    )
    proxy.inject(refuse)
    second = checkpointer.save(2, state_of(2))
    assert second is not None
    with pytest.raises(sw.StoreError, match="the server denies access"):
        second.result(SECONDS)
    proxy.clear()
    if on_failure == "raise":
        with pytest.raises(sw.StoreError, match="the server denies access"):
            checkpointer.save(3, state_of(3))
        checkpointer.close(wait=False)
        assert_restores(url, 2, shm, "memory")
    else:
        third = checkpointer.save(3, state_of(3))
        assert third is not None
        third.result(SECONDS)
        checkpointer.close()
        assert_restores(url, 3)
    for step in (1, 3)[: 1 + (on_failure == "warn")]:
        sw.open(url, step=step).verify()
