"""Ask the kernel whether bytes of a file are in the page cache."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def is_cached(fd: int, nbytes: int) -> bool:
    """Whether all pages of the first bytes of a file are in the page cache; False if unknown."""
    pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
    mapped = np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), np.uint8)
    asked = (mapped.ctypes.data, nbytes, pages.ctypes.data)
    return _libc.mincore(*map(ctypes.c_void_p, asked)) == 0 and bool((pages & 1).all())
