"""Locks for stores without locks: small files that their holder renews, and that expire.

A holder writes a lease, `{key}.shared-{nonce}.lease` or `{key}.exclusive-{nonce}.lease`, and then
lists the leases of the key. Of two holders that conflict, at least one sees the lease of the other,
because each lists after it wrote. Ages are differences of times in one listing, so only the clock
of the server matters.
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
from typing import Protocol

LEASE_SECONDS = 60.0
RENEWALS_PER_LEASE = 4
"""How often a lease is renewed before it would expire."""
MOST_LISTINGS = 5
"""How often a holder lists the leases before it gives up."""
PAUSE_SECONDS = 0.1
SAME_TIME_SECONDS = 5.0
"""Holders whose leases differ by at most this time may have started together."""
_LEASE = re.compile(r"(?P<key>.+)\.(?P<kind>shared|exclusive)-[0-9a-f]{16}\.lease")

log = logging.getLogger("shardwise")


class LeaseFiles(Protocol):
    """The directory of a store that has the leases."""

    def touch(self, name: str) -> None:
        """Create an empty file, or replace it, so that the server gives it the present time.

        Raises:
            PermissionError: this process may not write here.
        """
        ...

    def create_empty(self, name: str) -> None:
        """Create an empty file. Do nothing if the file exists."""
        ...

    def modification_times(self, prefix: str) -> Mapping[str, float]:
        """Return when each file whose name begins with `prefix` was modified.

        Returns:
            Seconds by the clock of the server, by the name of the file. Empty if the directory does
            not exist.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        ...


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """The times of leases.

    Attributes:
        lease: how many seconds a lease counts after it was written or renewed.
        pause: seconds between two listings, if it is unclear who holds the lock.
        sleep: the function that waits; tests pass another.
    """

    lease: float = LEASE_SECONDS
    pause: float = PAUSE_SECONDS
    sleep: Callable[[float], None] = time.sleep


def is_lease(name: str) -> bool:
    """Return whether a file is a lease. `Store.list` leaves these files out."""
    return _LEASE.fullmatch(name) is not None


@contextmanager
def hold(
    files: LeaseFiles, key: str, *, shared: bool, times: LeaseTimes | None = None
) -> Iterator[bool]:
    """Lock a file by a lease while the block runs. See `Store.hold`.

    A process that dies leaves its lease, which expires. Without the permission to write, a shared
    lock needs no lease: it succeeds if the file exists.

    Args:
        files: the directory of the file.
        key: the name of the file.
        shared: as for `Store.hold`.
        times: the times of leases.

    Yields:
        True if the file is locked. False if the lock is not available.
    """
    times = times or LeaseTimes()
    if shared and key not in files.modification_times(key):
        yield False
        return
    name = f"{key}.{'shared' if shared else 'exclusive'}-{secrets.token_hex(8)}.lease"
    try:
        files.touch(name)
    except PermissionError:
        if not shared:
            raise
        name = ""
    if not name:  # no yield above, because errors of the block would be chained to that one
        yield True
        return
    try:
        held = _is_held(files, key, name, shared, times)
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


def remove_expired(files: LeaseFiles, *, times: LeaseTimes | None = None) -> list[str]:
    """Delete the expired leases of a directory, and return the names of the others.

    Raises:
        OSError: the directory cannot be written.
    """
    times = times or LeaseTimes()
    if not any(map(is_lease, files.modification_times(""))):
        return []
    clock = f"clock.shared-{secrets.token_hex(8)}.lease"  # its time is the server's present time
    files.touch(clock)
    try:
        modified = files.modification_times("")
        live = _delete_expired(files, modified, modified.get(clock, 0.0), times)
    finally:
        _delete_quietly(files, clock)
    return sorted(set(live) - {clock})


def _is_held(files: LeaseFiles, key: str, name: str, shared: bool, times: LeaseTimes) -> bool:
    """Return whether no other lease conflicts with the lease `name`, which was just written."""
    for _ in range(MOST_LISTINGS):
        modified = files.modification_times(key)
        if name in modified:  # otherwise the listing lags
            rivals = {
                each: modified[each]
                for each in _delete_expired(files, modified, modified[name], times)
                if _conflicts(each, name, key, shared)
            }
            if not rivals:
                return _find_or_create_file(files, key, modified, shared)
            # Holders that began together see each other. Only the first by name looks again.
            began = min(rivals.values())
            if min(rivals) < name or abs(modified[name] - began) > SAME_TIME_SECONDS:
                return False
        times.sleep(times.pause)
    return False


def _conflicts(lease: str, own: str, key: str, shared: bool) -> bool:
    match = _LEASE.fullmatch(lease)
    if match is None or match["key"] != key or lease == own:
        return False
    return not shared or match["kind"] == "exclusive"


def _find_or_create_file(
    files: LeaseFiles, key: str, modified: Mapping[str, float], shared: bool
) -> bool:
    """Return whether the file to lock exists. An exclusive lock creates it."""
    if key not in modified and not shared:
        files.create_empty(key)
        return True
    return key in modified


def _delete_expired(
    files: LeaseFiles, modified: Mapping[str, float], now: float, times: LeaseTimes
) -> list[str]:
    """Delete the leases that have expired at `now`, and return the others."""
    leases = [name for name in modified if is_lease(name)]
    live = [name for name in leases if now - modified[name] < times.lease]
    for name in set(leases) - set(live):
        _delete_quietly(files, name)
    return live


def _renew(
    files: LeaseFiles, key: str, name: str, times: LeaseTimes, stop: threading.Event
) -> None:
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


def _renew_once(files: LeaseFiles, key: str, name: str, stop: threading.Event) -> bool:
    """Renew a lease. Return whether it still existed, as far as is known."""
    try:
        if name not in files.modification_times(key):
            return stop.is_set()
        if not stop.is_set():
            files.touch(name)
    except OSError as error:
        log.warning("cannot renew the lock %s, which is tried again: %s", name, error)
    return True


def _delete_quietly(files: LeaseFiles, name: str) -> None:
    try:
        files.delete(name)
    except OSError as error:
        log.info("cannot delete the lease %s, which expires by itself: %s", name, error)
