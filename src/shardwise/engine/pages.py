"""Files in memory, in large pages where the system has them.

A page of 2 MiB in place of 512 small ones saves most of what it takes to map a file anew, as each
process that restores must, and to walk through it. What cannot be had so stays in small pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from shardwise.store.store import Buffer

LARGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE: Linux 6.1 and later, whatever the pages of a file system are
_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_pages(fd: int, low: int, high: int, *, writable: bool = False, now: bool = False) -> Buffer:
    """Bytes `low:high` of a file, where they lie; `low` is a multiple of `LARGE`.

    They are unmapped when nothing refers to them any more.

    Args:
        writable: they may be written to.
        now: have all pages there at once, instead of one by one as they are used.

    Raises:
        OSError: they cannot be mapped.
    """
    if low == high:
        return np.zeros(0, np.uint8)
    # Large pages need aligned addresses, which Python's mmap does not give: it only reserves them.
    reserved = np.frombuffer(mmap.mmap(-1, high - low + LARGE, mmap.MAP_PRIVATE), np.uint8)
    start = -reserved.ctypes.data % LARGE
    found = reserved[start : start + high - low]
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | _FIXED | (mmap.MAP_POPULATE if now else 0)
    address = found.ctypes.data
    if _libc.mmap(address, high - low, access, flags, fd, low) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    found.flags.writeable = writable
    return found


def allocate_pages(fd: int, size: int) -> None:
    """Give a file of `size` bytes pages, so that writing to it can neither fail nor wait for them.

    They are large where that can be. A large page is made at once of what has one small page, for
    a fraction of what it takes to make it of 512.

    Raises:
        OSError: there is no room; what the file had before it still has.
    """
    whole = size // LARGE * LARGE
    if whole and _enlarge(fd, 0, LARGE):
        _enlarge(fd, LARGE, whole)
    os.posix_fallocate(fd, 0, size)


def _enlarge(fd: int, low: int, high: int) -> bool:
    """Have large pages, if that can be; whether all are.

    It cannot where the kernel is older, the file is on a disk, or memory is in pieces.
    """
    for at in range(low, high, LARGE):
        os.posix_fallocate(fd, at, 1)
    found = map_pages(fd, low, high)
    return low == high or _libc.madvise(found.ctypes.data, high - low, _COLLAPSE) == 0
