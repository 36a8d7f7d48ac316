"""Exclusive locks for stores without locks: small files that their holder renews, and that expire.

A holder writes a lease, `{key}.{nonce}.lease`, and then lists the leases of the key. Of two
holders, at least one sees the lease of the other, because each lists after it wrote. Ages are
differences of times in one listing, so only the clock of the server matters.

Nothing here locks readers. They have `StoreTraits.reading_grace` to read what was removed.
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

from shardwise.store.store import LOCK_EXPIRY, Store

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
class LeasesIn:
    """The leases in the directory of a store.

    Attributes:
        store: the store, whose `list` leaves out leases.
        list_times: returns when each file of the directory was modified, in seconds by the clock of
            the server, with leases; {} if there is no directory.
    """

    store: Store
    list_times: Callable[[], Mapping[str, float]]

    def touch(self, name: str) -> None:
        """Create an empty file, or replace it, so that the server gives it the present time.

        Raises:
            PermissionError: this process may not write here.
        """
        self.store.publish(name, b"", replace=True)

    def create_empty(self, name: str) -> None:
        """Create an empty file. Do nothing if the file exists."""
        if self.store.stat(name) is None:
            self.touch(name)

    def modification_times(self, prefix: str) -> Mapping[str, float]:
        """Return when each file whose name begins with `prefix` was modified."""
        return {name: time for name, time in self.list_times().items() if name.startswith(prefix)}

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        self.store.delete(name)


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The times of leases.

    Attributes:
        lease: how many seconds a lease counts after it was written or renewed.
        pause: seconds between two listings, if it is unclear who holds the lock.
        sleep: the function that waits; tests pass another.
    """

    lease: float = LOCK_EXPIRY
    pause: float = PAUSE_SECONDS
    sleep: Callable[[float], None] = time.sleep


def is_lease(name: str) -> bool:
    """Return whether a file is a lease. `Store.list` leaves these files out."""
    return _LEASE.fullmatch(name) is not None


def lease_name(key: str) -> str:
    """Return a new name of a lease. Other temporary files can have one: listings leave it out."""
    return f"{key}.{secrets.token_hex(8)}.lease"


@contextmanager
def hold(files: LeasesIn, key: str, *, times: LeaseTimes | None = None) -> Iterator[bool]:
    """Lock a file exclusively by a lease while the block runs. Create the file if it is missing.

    A process that dies leaves its lease, which expires.

    Args:
        files: the directory of the file.
        key: the name of the file.
        times: the times of leases.

    Yields:
        True if the file is locked. False if the lock is not available.
    """
    times = times or LeaseTimes()
    name = lease_name(key)
    files.touch(name)
    try:
        held = _is_held(files, key, name, times)
    except BaseException:
        _delete_quietly(files, name)
        raise
    if not held:
        _delete_quietly(files, name)  # now, because the block may try again
        yield False
        return
    stop = threading.Event()
    renewer = threading.Thread(
        target=_renew, args=(files, key, name, times, stop), name="shardwise-lease", daemon=True
    )
    renewer.start()
    try:
        yield True
    finally:
        stop.set()
        renewer.join(times.lease)  # a renewal under way would write the lease again
        _delete_quietly(files, name)


def remove_expired(files: LeasesIn, *, times: LeaseTimes | None = None) -> list[str]:
    """Delete the expired leases of a directory, and return the names of the others.

    Raises:
        OSError: the directory cannot be written.
    """
    times = times or LeaseTimes()
    if not any(map(is_lease, files.modification_times(""))):
        return []
    clock = lease_name("clock")  # its time is the server's present time
    files.touch(clock)
    try:
        modified = files.modification_times("")
        live = _delete_expired(files, modified, modified.get(clock, 0.0), times)
    finally:
        _delete_quietly(files, clock)
    return sorted(set(live) - {clock})


def _is_held(files: LeasesIn, key: str, name: str, times: LeaseTimes) -> bool:
    """Return whether there is no lease of the key but `name`, which was just written."""
    for _ in range(MOST_LISTINGS):
        modified = files.modification_times(key)
        if name in modified:  # otherwise the listing lags
            rivals = {
                each: modified[each]
                for each in _delete_expired(files, modified, modified[name], times)
                if each != name and _key_of(each) == key
            }
            if not rivals:
                if key not in modified:
                    files.create_empty(key)
                return True
            # Holders that began together see each other. Only the first by name looks again.
            began = min(rivals.values())
            if min(rivals) < name or abs(modified[name] - began) > SAME_TIME_SECONDS:
                return False
        times.sleep(times.pause)
    return False


def _key_of(lease: str) -> str:
    match = _LEASE.fullmatch(lease)
    return "" if match is None else match["key"]


def _delete_expired(
    files: LeasesIn, modified: Mapping[str, float], now: float, times: LeaseTimes
) -> list[str]:
    """Delete the leases that have expired at `now`, and return the others."""
    leases = [name for name in modified if is_lease(name)]
    live = [name for name in leases if now - modified[name] < times.lease]
    for name in set(leases) - set(live):
        _delete_quietly(files, name)
    return live


def _renew(files: LeasesIn, key: str, name: str, times: LeaseTimes, stop: threading.Event) -> None:
    """Renew a lease until `stop` is set."""
    while not stop.wait(times.lease / RENEWALS_PER_LEASE):
        if not _renew_once(files, key, name, stop):
            log.warning(
                "lost the lock %s: its lease expired, because this process was stopped or the "
                "storage did not answer for %g s; another process may hold the lock now",
                name,
                times.lease,
            )
            return


def _renew_once(files: LeasesIn, key: str, name: str, stop: threading.Event) -> bool:
    """Renew a lease. Return whether it still existed, as far as is known."""
    try:
        if name not in files.modification_times(key):
            return stop.is_set()
        if not stop.is_set():
            files.touch(name)
    except OSError as error:
        log.warning("cannot renew the lock %s, which is tried again: %s", name, error)
    return True


def _delete_quietly(files: LeasesIn, name: str) -> None:
    try:
        files.delete(name)
    except OSError as error:
        log.info("cannot delete the lease %s, which expires by itself: %s", name, error)
