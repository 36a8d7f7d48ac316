"""Checkpointers whose root is a store without locks, directories and renames."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import shardwise as sw
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.group import SoloGroup
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import CheckpointNotFoundError, StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    REMOVED,
    data_file,
    lock_file,
    step_directory,
)
from shardwise.kernel.store import LocalStore
from shardwise.parts.lineage import read_or_create_lineage, resume_from
from shardwise.parts.stores.remote import RetryingStore
from shardwise.parts.stores.retry import Retry
from shardwise.ports.store import Store, open_store
from tests.memory_store import MemoryStore, Server
from tests.tools.wrapped_store import WrappedStore

SAVE_ID = "0123456789abcdef"
T = TypeVar("T")


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def root(server: Server) -> MemoryStore:
    return MemoryStore(server, "bucket/run/")


def opened(root: MemoryStore, **options: object) -> sw.Checkpointer:
    return sw.Checkpointer(root, memory=None, **options)  # type: ignore[arg-type]


def value_of(place: MemoryStore) -> float:
    state = {"t": torch.zeros(3)}
    sw.load(place, state)
    return float(state["t"][0])


def save_steps(root: MemoryStore, *steps: int, **options: object) -> None:
    with opened(root, **options) as checkpointer:
        for step in steps:
            value = {"t": torch.full((3,), float(step))}
            checkpointer.save(step, value, overwrite=step == steps[0])


def test_steps_are_saved_kept_restored_and_nothing_else_stays(
    server: Server, root: MemoryStore
) -> None:
    save_steps(root, 1, 2, 3, 4, keep=sw.Keep(last=2))
    state = {"t": torch.zeros(3)}
    with opened(root) as checkpointer:
        assert checkpointer.steps() == [3, 4]
        assert checkpointer.restore(state) == 4
        assert state["t"].tolist() == [4.0] * 3
    names = sorted(path.removeprefix("bucket/run/") for path in server.objects)
    assert [name.split("/")[0] for name in names] == [
        "run.json",
        *["step-00000003"] * 3,
        *["step-00000004"] * 3,
        "telemetry",  # of the restore
    ]
    other = MemoryStore(server, "bucket/other/")
    with opened(other, start_from=root) as checkpointer:
        assert checkpointer.restore(state) == 4


def test_of_eight_writers_of_a_step_one_wins_and_the_others_are_told(
    server: Server, root: MemoryStore
) -> None:
    start = threading.Barrier(8)

    def attempt(value: int) -> str:
        start.wait()
        try:
            sw.save(root.at("it"), {"t": torch.full((3,), float(value))}, group=SoloGroup())
        except sw.CheckpointExistsError:
            return "told"
        return "won"

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(attempt, range(8)))
    assert sorted(ended) == ["told"] * 7 + ["won"]
    assert value_of(root.at("it")) == ended.index("won")
    CheckpointDirectory(root.at("it")).remove_leftovers()
    assert len(root.at("it").list()) == 2


def test_files_of_a_killed_save_go_once_its_lock_has_expired(
    server: Server, root: MemoryStore
) -> None:
    save_steps(root, 1)
    killed = root.at(step_directory(2))
    killed.publish(data_file(0, SAVE_ID), b"x", replace=False)
    lease = f"{lock_file(SAVE_ID)}.{SAVE_ID}.lease"
    killed.publish(lock_file(SAVE_ID), b"", replace=False)
    killed.publish(lease, b"", replace=False)
    with opened(root):
        assert len(killed.list()) == 2, "it may still run"
    server.now += server.lease + 1
    with opened(root) as checkpointer:
        assert killed.list() == []
        assert checkpointer.steps() == [1]
    assert not [path for path in server.objects if "00000002" in path]


def test_files_of_a_removed_checkpoint_stay_for_readers_without_locks(
    server: Server, root: MemoryStore
) -> None:
    server.grace = 600.0
    save_steps(root, 1)
    first = root.at(step_directory(1))
    tensor = sw.open(first)["t"]
    save_steps(root, 2, keep=sw.Keep(last=1))
    assert Root(root).steps() == [2]
    assert isinstance(tensor, sw.SavedTensor)
    assert tensor[...].tolist() == [1.0] * 3
    assert REMOVED in first.list()
    CheckpointDirectory(first).mark_as_removed(time.time() - 590)
    save_steps(root, 3, keep=sw.Keep(last=1))
    assert first.list()
    CheckpointDirectory(first).mark_as_removed(time.time() - 601)
    save_steps(root, 4, keep=sw.Keep(last=1))
    assert first.list() == []
    with pytest.raises(CheckpointNotFoundError, match="was removed by retention"):
        tensor[...]
    with pytest.raises(CheckpointNotFoundError, match="was removed by retention"):
        sw.open(root.at(step_directory(2)))
    assert root.at(step_directory(2)).list()
    for step in (2, 3):
        Root(root).at(step).mark_as_removed(time.time() - 601)
    with opened(root) as checkpointer:
        assert checkpointer.steps() == [4]
    assert root.list() == ["run.json", step_directory(4)]


def test_a_removed_step_can_be_saved_again(server: Server, root: MemoryStore) -> None:
    server.grace = 600.0
    save_steps(root, 1, 2, keep=sw.Keep(last=1))
    save_steps(root, 1)
    assert Root(root).steps() == [1, 2]
    assert value_of(root.at(step_directory(1))) == 1.0


def test_thousands_of_steps_are_listed_in_few_requests(server: Server, root: MemoryStore) -> None:
    for step in range(1, 2001):
        place = root.at(step_directory(step))
        place.publish(MANIFEST, b"{}", replace=False)
        place.publish(data_file(0, SAVE_ID), b"", replace=False)
    server.requests.clear()
    assert len(Root(root).steps()) == 2000
    assert sum(server.requests.values()) == 2001
    with opened(root):
        assert sum(server.requests.values()) < 6010, "at most two requests for each step"


def test_a_bucket_without_permission_to_delete_loses_nothing(
    server: Server, root: MemoryStore
) -> None:
    server.refused = {"delete"}
    save_steps(root, 1)
    with opened(root, keep=sw.Keep(last=1)) as checkpointer:
        with pytest.raises(PermissionError, match=r"delete .* access denied"):
            checkpointer.save(2, {"t": torch.full((3,), 2.0)}, overwrite=True)
        assert checkpointer.steps() == [1, 2]
    assert [value_of(root.at(step_directory(step))) for step in (1, 2)] == [1.0, 2.0]


def test_a_bucket_without_permission_to_write_can_be_restored_from(
    server: Server, root: MemoryStore
) -> None:
    save_steps(root, 1)
    server.refused = {"put", "delete"}
    state = {"t": torch.zeros(3)}
    with opened(root) as checkpointer:
        assert checkpointer.restore(state) == 1
    assert state["t"].tolist() == [1.0] * 3


def test_what_a_killed_process_left_incomplete_goes_when_another_commits_the_save(
    root: MemoryStore,
) -> None:
    """As when an agent is killed while it copies files to storage, and the next one goes on."""
    place = root.at("it")
    sw.save(place, {"t": torch.full((3,), 1.0)}, group=SoloGroup())
    names, manifest = place.list(), place.read(MANIFEST, limit=1 << 20)
    files = [name for name in names if name != MANIFEST]
    place.delete(MANIFEST)
    place.publish(f"{files[0]}.0123abcd.part", b"x", replace=False)
    save_id = files[0].split("-")[1][:16]
    directory = CheckpointDirectory(place)
    with directory.lock(save_id):
        directory.commit(save_id, manifest, files, overwrite=False)
    assert place.list() == names
    assert value_of(place) == 1.0


def test_a_save_whose_lock_expired_commits_nothing_without_its_files(root: MemoryStore) -> None:
    place = root.at("it")
    name = data_file(0, SAVE_ID)
    place.publish(name, b"x", replace=False)
    with pytest.raises(StoreUnavailableError, match="another process removed files of it: r00001-"):
        CheckpointDirectory(place).publish(b"{}", [name, data_file(1, SAVE_ID)], replace=False)

    times = iter([0.0, 11.0])

    def removed_meanwhile() -> float:
        now = next(times)
        if now:
            place.delete(name)
        return now

    with pytest.raises(StoreUnavailableError, match="another process removed files"):
        CheckpointDirectory(place).publish(b"{}", [name], replace=False, clock=removed_meanwhile)
    assert place.list() == []


def test_a_publication_that_is_repeated_looks_for_the_files_again(root: MemoryStore) -> None:
    place = root.at("it")
    name = data_file(0, SAVE_ID)
    place.publish(name, b"x", replace=False)

    class Unreachable(WrappedStore):
        """Does not answer the first time, and meanwhile another process removes the file."""

        attempts = 0

        def run(self, operation: str, path: str, act: Callable[[], T]) -> T:
            if operation == "publish":
                self.attempts += 1
                if self.attempts == 1:
                    place.delete(name)
                    raise StoreUnavailableError("no answer")
            return act()

    retrying = RetryingStore(Unreachable(place), Retry(sleep=lambda _: None))
    with pytest.raises(StoreUnavailableError, match="another process removed files"):
        CheckpointDirectory(retrying).publish(b"{}", [name], replace=False)
    assert place.list() == []


def test_a_run_is_recorded_as_an_object(root: MemoryStore) -> None:
    lineage = read_or_create_lineage(root)
    assert read_or_create_lineage(root) == lineage
    assert resume_from(root, lineage.run, 7).epoch == 1


def test_agents_need_a_root_that_they_can_open(root: MemoryStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="pass a path or URL, or save synchronously"):
        sw.Checkpointer(root, memory=sw.Memory(dir=str(tmp_path)))
    assert not os.listdir(tmp_path)


@pytest.fixture
def removals(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories of steps that retention removes after they were chosen."""
    names: list[str] = []
    lock = LocalStore.lock

    def lock_late(
        self: LocalStore, key: str, *, shared: bool = False
    ) -> AbstractContextManager[bool]:
        if shared and self.path.name in names:
            names.remove(self.path.name)
            sw.remove(self.path)
        return lock(self, key, shared=shared)

    monkeypatch.setattr(LocalStore, "lock", lock_late)
    return names


@pytest.mark.parametrize("step", ["newest", sw.Best("loss", "max")])
@pytest.mark.parametrize("removed", [1, 2, 3])
def test_another_step_is_chosen_if_retention_removes_the_chosen_one(
    tmp_path: Path, removals: list[str], step: Any, removed: int
) -> None:
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for i in range(1, 5):
            checkpointer.save(i, {"t": torch.tensor([float(i)])}, metrics={"loss": i})
    removals[:] = [step_directory(i) for i in range(4, 4 - removed, -1)]
    state = {"t": torch.zeros(1)}
    sw.load(tmp_path, state, step=step)
    assert state["t"].tolist() == [4 - removed]
    removals[:] = [step_directory(4 - removed)]
    if removed < 3:
        assert sw.open(tmp_path, step=step)["t"][:].tolist() == [3 - removed]


def test_a_step_that_the_user_has_chosen_is_not_replaced_by_another(
    tmp_path: Path, removals: list[str]
) -> None:
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        for i in (1, 2):
            checkpointer.save(i, {"t": torch.ones(1)})
    removals[:] = [step_directory(2)]
    with pytest.raises(sw.CheckpointNotFoundError, match="step-00000002"):
        sw.open(tmp_path, step=2)


class Proxy:
    """A store around another one, which passes on all that it does not have itself."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def __str__(self) -> str:
        return str(self._store)

    def at(self, name: str) -> Proxy:
        return Proxy(self._store.at(name))

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        self._store.publish(key, data, replace=replace)


def test_a_proxy_of_a_store_that_repeats_its_requests_is_a_store_of_its_own(tmp_path: Path) -> None:
    retrying = RetryingStore(open_store(str(tmp_path)), Retry(sleep=lambda _: None))
    sw.save(Proxy(retrying).at("checkpoint"), {"w": torch.ones(2)})
    assert sw.open(tmp_path / "checkpoint")["w"].tensor().tolist() == [1.0, 1.0]
