"""A local store that is as slow as a remote store, and counts the bytes that are read."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import replace
from pathlib import Path

from shardwise.kernel.store import LocalStore, StoreTraits
from shardwise.kernel.store.local_files import LocalReader
from shardwise.kernel.store.store import Buffer

_METER_STATE = struct.Struct("<dQ")  # the time at which the last read ends; the bytes of all reads


class Meter:
    """A limit on the bytes per second that all processes of this machine read together.

    Like the clients of a remote store, the processes share the rate. A read begins when all earlier
    reads have ended, and takes the time that its bytes need at this rate.

    Args:
        path: a file through which the processes share the meter; it is created if it is missing.
        rate: bytes per second.
    """

    def __init__(self, path: str | os.PathLike[str], rate: float) -> None:
        self.path = Path(path)
        self.rate = rate

    def wait_for_bytes(self, count: int) -> None:
        """Count `count` bytes, and sleep until a read of so many bytes would end."""
        with open(self._open(), "r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            busy_until, total = self._read_state(file.fileno())
            busy_until = max(busy_until, time.monotonic()) + count / self.rate
            os.pwrite(file.fileno(), _METER_STATE.pack(busy_until, total + count), 0)
        time.sleep(max(0.0, busy_until - time.monotonic()))

    def bytes_read(self) -> int:
        """Return how many bytes all processes have read so far."""
        with open(self._open(), "rb", buffering=0) as file:
            return self._read_state(file.fileno())[1]

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _read_state(self, fd: int) -> tuple[float, int]:
        data = os.pread(fd, _METER_STATE.size, 0).ljust(_METER_STATE.size, b"\0")
        busy_until, total = _METER_STATE.unpack(data)
        return busy_until, total


class ThrottledStore(LocalStore):
    """A local store whose files are read at the rate of a meter."""

    def __init__(self, path: str | os.PathLike[str], meter: Meter) -> None:
        super().__init__(path)
        self._meter = meter

    @property
    def traits(self) -> StoreTraits:
        """The traits of a store that several nodes share."""
        return replace(super().traits, is_node_local=False)

    def at(self, name: str) -> ThrottledStore:
        """Return the store one level below, with the same meter."""
        return ThrottledStore(super().at(name).path, self._meter)

    def open(self, path: str, size: int | None = None) -> _ThrottledReader:
        """Open a regular file."""
        return _ThrottledReader(self.path / path, self._meter)


class _ThrottledReader(LocalReader):
    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path)
        self._meter = meter

    def read_at(self, offset: int, out: Buffer) -> int:
        self._meter.wait_for_bytes(len(out))
        return super().read_at(offset, out)
