"""Whether the page cache holds part of a file: asked, without reading anything into it."""

from __future__ import annotations

import ctypes

_CACHESTAT = 451  # the same number on every architecture; Linux 6.5 and later


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_libc = ctypes.CDLL(None, use_errno=True)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether all pages of this range are in the page cache; False where it cannot be known."""
    wanted, found = _Range(offset, length), _Statistics()
    status = _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0)
    pages = -(-(offset + length) // 4096) - offset // 4096
    return bool(status == 0 and found.cached >= pages)
