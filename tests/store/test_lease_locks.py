"""Leases: who gets the lock, when a lease expires, and what stays behind."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field

import pytest

from shardwise.ports.store import LeaseDirectory, is_lease
from tests.tools.waiting import wait_until

KEY = "manifest.json"


@dataclass
class Server:
    """A directory of empty files, with its own clock."""

    now: float = 1000.0
    files: dict[str, float] = field(default_factory=dict)
    may_write: bool = True
    may_delete: bool = True
    lag: int = 0  # how many listings show the state before the last write
    shown: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def publish(self, name: str, data: bytes, *, replace: bool) -> None:
        if not self.may_write:
            raise PermissionError(name)
        with self.lock:
            self.shown = dict(self.files)
            self.files[name] = self.now

    def stat(self, name: str) -> float | None:
        return self.files.get(name)

    def times(self) -> Mapping[str, float]:
        with self.lock:
            self.lag -= 1
            return dict(self.shown if self.lag >= 0 else self.files)

    def delete(self, name: str) -> None:
        if not self.may_delete:
            raise PermissionError(name)
        with self.lock:
            self.files.pop(name, None)

    def leases(self) -> list[str]:
        return [name for name in self.files if is_lease(name)]


def hold(server: Server, key: str, **times: float) -> AbstractContextManager[bool]:
    return LeaseDirectory(server, server.times, **times).hold(key)


def hold_at_once(server: Server, key: str) -> AbstractContextManager[bool]:
    """Lock a file; waiting moves the clock of the server."""

    def sleep(seconds: float) -> None:
        server.now += seconds

    return LeaseDirectory(server, server.times, sleep=sleep).hold(key)


@pytest.fixture
def server() -> Server:
    return Server(files={KEY: 0.0})


def test_of_two_locks_one_is_held(server: Server) -> None:
    with hold_at_once(server, KEY) as held:
        assert held
        with hold_at_once(server, KEY) as also:
            assert not also
        assert len(server.leases()) == 1
    assert server.files == {KEY: 0.0}


def test_a_lock_creates_the_file() -> None:
    server = Server()
    with hold(server, KEY) as held:
        assert held
    assert list(server.files) == [KEY]


def test_locks_of_other_files_do_not_conflict(server: Server) -> None:
    """Not even of a file whose name begins with this one's."""
    with (
        hold(server, f"{KEY}.0123456789abcdef") as other,
        hold(server, KEY) as held,
    ):
        assert other
        assert held


@pytest.mark.parametrize(("age", "held"), [(59.0, False), (60.0, True)])
def test_the_lease_of_a_dead_process_expires(server: Server, age: float, held: bool) -> None:
    dead = f"{KEY}.{'0' * 16}.lease"
    server.files[dead] = server.now - age
    with hold_at_once(server, KEY) as locked:
        assert locked == held
    assert (dead in server.files) != held


def test_attempts_that_failed_do_not_delay_later_attempts(server: Server) -> None:
    """Not even if their blocks have not ended, as in an `ExitStack`."""
    server.files[f"{KEY}.{'0' * 16}.lease"] = server.now
    with ExitStack() as locks:
        for _ in range(3):
            lock = hold_at_once(server, KEY)
            assert not locks.enter_context(lock)
            assert len(server.leases()) == 1
            server.now += 20
        assert locks.enter_context(hold_at_once(server, KEY))


def test_a_lease_is_renewed_while_its_holder_works(server: Server) -> None:
    with hold(server, KEY, lease_seconds=0.2) as held:
        assert held
        (lease,) = server.leases()
        server.now += 100
        wait_until(lambda: server.files[lease] == server.now)
    assert not server.leases()


def test_a_lost_lease_is_reported_and_not_written_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with hold(server, KEY, lease_seconds=0.2):
        server.files = {KEY: 0.0}
        wait_until(lambda: "lost the lock" in caplog.text)
    assert not server.leases()


def test_who_may_not_write_holds_no_lock(server: Server) -> None:
    server.may_write = False
    with pytest.raises(PermissionError), hold(server, KEY):
        pass
    assert not server.leases()


def test_who_may_not_delete_leaves_leases_that_expire(server: Server) -> None:
    server.may_delete = False
    with hold(server, KEY) as held:
        assert held
    assert len(server.leases()) == 1
    server.now += 60
    with hold(server, KEY) as held:
        assert held


@pytest.mark.parametrize(("lag", "held"), [(1, True), (3, True), (20, False)])
def test_a_listing_that_lags_is_waited_for_a_while(server: Server, lag: int, held: bool) -> None:
    """A lock is not granted on a listing that lacks the holder's own lease."""
    server.shown = dict(server.files)
    server.lag = lag
    with hold_at_once(server, KEY) as locked:
        assert locked == held


def test_of_many_exclusive_holders_at_most_one_has_the_lock(server: Server) -> None:
    """Over many rounds, usually exactly one."""
    rounds = 30
    held_at_once: list[int] = []
    for _ in range(rounds):
        barrier = threading.Barrier(8)
        done = threading.Barrier(8)

        def take(barrier: threading.Barrier = barrier, done: threading.Barrier = done) -> bool:
            barrier.wait()
            with hold(server, KEY, pause=0.001) as held:
                done.wait()
                return held

        with ThreadPoolExecutor(8) as pool:
            held_at_once.append(
                sum(future.result() for future in [pool.submit(take) for _ in "8" * 8])
            )
    assert max(held_at_once) == 1
    assert sum(held_at_once) >= rounds // 2


def test_expired_leases_of_all_files_are_removed(server: Server) -> None:
    assert LeaseDirectory(server, server.times).remove_expired() == []
    old = f"a.{'1' * 16}.lease"
    server.files[old] = server.now - 61
    with ExitStack() as locks:
        locks.enter_context(hold(server, KEY))
        (live,) = set(server.leases()) - {old}
        assert LeaseDirectory(server, server.times).remove_expired() == [live]
        assert server.leases() == [live]
    assert LeaseDirectory(server, server.times).remove_expired() == []
