"""Exclusive locks for stores without locks: small files that their holder renews, and that expire.

A holder writes a lease, `{key}.{nonce}.lease`, and then lists the leases of the key. Of two
holders, at least one sees the lease of the other, because each lists after it wrote. Ages are
differences of times in one listing, so only the clock of the server matters.

Readers hold no lease. The files of a removed checkpoint stay for `StoreTraits.reading_grace`
seconds, so that readers can finish.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.kernel.store.store import LOCK_EXPIRY, Store

RENEWALS_PER_LEASE = 4
"""How often a lease is renewed before it would expire."""
MOST_LISTINGS = 5
"""How often a holder lists the leases before it gives up."""
PAUSE_SECONDS = 0.1
SAME_TIME_SECONDS = 5.0
"""Holders whose leases differ by at most this time may have started together."""
_LEASE = re.compile(r"(?P<key>.+)\.[0-9a-f]{16}\.lease")

log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class LeaseDirectory:
    """The leases in the directory of a store.

    Attributes:
        store: the store, whose `list` leaves out leases.
        list_times: returns the time at which each file of the directory, leases included, was
            modified: seconds by the server's clock. {} if there is no directory.
        lease_seconds: how long a lease counts after it was written or renewed.
        pause: seconds between two listings, if it is unclear who holds the lock.
        sleep: the function that waits; tests pass another.
    """

    store: Store
    list_times: Callable[[], Mapping[str, float]]
    lease_seconds: float = LOCK_EXPIRY
    pause: float = PAUSE_SECONDS
    sleep: Callable[[float], None] = time.sleep

    @contextmanager
    def hold(self, key: str) -> Iterator[bool]:
        """Lock a file by a lease while the block runs. Create the file if it is missing.

        A process that dies leaves its lease, which expires.

        Yields:
            True if the file is locked. False if the lock is not available.

        Raises:
            PermissionError: this process may not write here.
        """
        name = lease_name(key)
        self._touch(name)
        try:
            held = self._is_held(key, name)
        except BaseException:
            self._delete_quietly(name)
            raise
        if not held:
            self._delete_quietly(name)  # now, because the block may try again
            yield False
            return
        stop = threading.Event()
        renewer = threading.Thread(
            target=self._renew, args=(name, stop), name="shardwise-lease", daemon=True
        )
        renewer.start()
        try:
            yield True
        finally:
            stop.set()
            renewer.join(self.lease_seconds)  # a renewal under way would write the lease again
            self._delete_quietly(name)

    def remove_expired(self) -> list[str]:
        """Delete the expired leases of the directory, and return the names of the others.

        Raises:
            OSError: the directory cannot be written.
        """
        if not any(map(is_lease, self.list_times())):
            return []
        clock = lease_name("clock")  # its time is the server's present time
        self._touch(clock)
        try:
            modified = self.list_times()
            live = self._delete_expired(modified, modified.get(clock, 0.0))
        finally:
            self._delete_quietly(clock)
        return sorted(set(live) - {clock})

    def _touch(self, name: str) -> None:
        """Create or replace an empty file, so that the server gives it the present time."""
        self.store.publish(name, b"", replace=True)

    def _is_held(self, key: str, name: str) -> bool:
        """Return whether there is no lease of the key but `name`, which was just written."""
        for _ in range(MOST_LISTINGS):
            modified = self.list_times()
            if name in modified:  # otherwise the listing lags
                live = self._delete_expired(modified, modified[name])
                rivals = {n: modified[n] for n in live if n != name and _key_of(n) == key}
                if not rivals:
                    if key not in modified and self.store.stat(key) is None:
                        self._touch(key)
                    return True
                # Holders that began together see each other. Only the first by name looks again.
                began = min(rivals.values())
                if min(rivals) < name or abs(modified[name] - began) > SAME_TIME_SECONDS:
                    return False
            self.sleep(self.pause)
        return False

    def _delete_expired(self, modified: Mapping[str, float], now: float) -> list[str]:
        """Delete the leases that have expired at `now`, and return the others."""
        leases = [name for name in modified if is_lease(name)]
        live = [name for name in leases if now - modified[name] < self.lease_seconds]
        for name in set(leases) - set(live):
            self._delete_quietly(name)
        return live

    def _renew(self, name: str, stop: threading.Event) -> None:
        """Renew a lease until `stop` is set."""
        while not stop.wait(self.lease_seconds / RENEWALS_PER_LEASE):
            if not self._renew_once(name, stop):
                log.warning(
                    "lost the lock %s: its lease expired, because this process was stopped or the "
                    "storage did not answer for %g s; another process may hold the lock now",
                    *(name, self.lease_seconds),
                )
                return

    def _renew_once(self, name: str, stop: threading.Event) -> bool:
        """Renew a lease. Return whether it still existed, as far as is known."""
        try:
            if name not in self.list_times():
                return stop.is_set()
            if not stop.is_set():
                self._touch(name)
        except OSError as error:
            log.warning("cannot renew the lock %s, which is tried again: %s", name, error)
        return True

    def _delete_quietly(self, name: str) -> None:
        try:
            self.store.delete(name)
        except OSError as error:
            log.info("cannot delete the lease %s, which expires by itself: %s", name, error)


def is_lease(name: str) -> bool:
    """Return whether a file is a lease. `Store.list` leaves these files out."""
    return _LEASE.fullmatch(name) is not None


def lease_name(key: str) -> str:
    """Return a new lease name for a key. Temporary files may use it too: listings leave it out."""
    return f"{key}.{secrets.token_hex(8)}.lease"


def _key_of(lease: str) -> str:
    match = _LEASE.fullmatch(lease)
    return "" if match is None else match["key"]
