"""Files mapped in huge pages: the same bytes, also where there are no huge pages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwise.kernel.engine.buffers import HUGE_PAGE, allocate_pages, map_pages

SIZE = 3 * HUGE_PAGE + 12_345
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def has_huge_pages() -> bool:
    """Whether this system can have them when asked: Linux 6.1 or later, and pages of 2 MiB."""
    version = tuple(int(part) for part in os.uname().release.split(".")[:2])
    return (
        version >= (6, 1)
        and SWITCH.exists()
        and int(SWITCH.read_text(encoding="utf-8")) == HUGE_PAGE
    )


@pytest.fixture(params=["memory", "disk"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """A file with pages for all of its bytes."""
    if request.param == "memory":
        opened = os.memfd_create("pages", os.MFD_CLOEXEC)
    else:
        opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    os.posix_fallocate(opened, 0, SIZE)
    yield opened
    os.close(opened)


def mapping(address: int) -> list[str]:
    """What the system says of the mapping at an address of this process."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith(f"{address:x}-")]
    return lines[starts[0] : starts[0] + 25] if starts else []


def test_bytes_are_those_of_the_file(fd: int) -> None:
    expected = np.random.default_rng(0).bytes(SIZE)
    os.pwrite(fd, expected, 0)
    for low, high in (
        (0, SIZE),
        (0, 1),
        (HUGE_PAGE, SIZE),
        (2 * HUGE_PAGE, 3 * HUGE_PAGE),
        (HUGE_PAGE, HUGE_PAGE),
    ):
        for now in (False, True):
            assert map_pages(fd, low, high, populate=now).tobytes() == expected[low:high]


def test_only_what_is_writable_is_written(fd: int) -> None:
    written = map_pages(fd, HUGE_PAGE, SIZE, writable=True)
    written[5] = 7
    assert os.pread(fd, 6, HUGE_PAGE) == b"\0\0\0\0\0\7"
    with pytest.raises(ValueError, match="read-only"):
        map_pages(fd, 0, SIZE)[0] = 1


def test_it_is_unmapped_when_nothing_refers_to_it(fd: int) -> None:
    whole = map_pages(fd, 0, SIZE)
    address, part = whole.ctypes.data, whole[1:2]
    del whole
    assert mapping(address)
    del part
    assert not mapping(address)


def test_what_cannot_be_mapped_is_an_error(fd: int) -> None:
    with pytest.raises(OSError, match="Bad file"):
        map_pages(-1, 0, SIZE)
    with pytest.raises(OSError, match="Invalid"):
        map_pages(fd, 1, SIZE)


def test_giving_a_file_pages_leaves_its_bytes_as_they_are(fd: int) -> None:
    expected = np.random.default_rng(0).bytes(SIZE)
    os.pwrite(fd, expected, 0)
    for size in (SIZE, HUGE_PAGE + 1, 0):
        allocate_pages(fd, max(size, 1))
    assert os.pread(fd, SIZE, 0) == expected
    assert os.fstat(fd).st_blocks * 512 == -(-SIZE // 4096) * 4096
    os.ftruncate(fd, HUGE_PAGE + 1)
    os.ftruncate(fd, SIZE)
    allocate_pages(fd, SIZE)
    assert os.pread(fd, SIZE, 0) == expected[: HUGE_PAGE + 1].ljust(SIZE, b"\0")


@pytest.mark.parametrize("size", [1, HUGE_PAGE - 1, HUGE_PAGE, SIZE])
def test_all_bytes_of_a_file_have_pages(tmp_path: Path, size: int) -> None:
    on_disk = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    for fd in (on_disk, os.memfd_create("pages", os.MFD_CLOEXEC)):
        os.ftruncate(fd, size)
        allocate_pages(fd, size)
        assert os.fstat(fd).st_blocks * 512 >= size
        assert os.fstat(fd).st_size == size
        os.close(fd)


@pytest.mark.skipif(not has_huge_pages(), reason="the system has no huge pages")
@pytest.mark.parametrize("before", [0, 1, HUGE_PAGE, SIZE])
def test_a_file_in_memory_gets_large_pages(before: int) -> None:
    fd = os.memfd_create("pages", os.MFD_CLOEXEC)
    try:
        if before:
            os.posix_fallocate(fd, 0, before)  # in small ones
        os.ftruncate(fd, SIZE)
        allocate_pages(fd, SIZE)
        found = map_pages(fd, 0, SIZE, populate=True)
        (large,) = (line for line in mapping(found.ctypes.data) if "ShmemPmdMapped" in line)
        assert int(large.split()[1]) == 3 * HUGE_PAGE // 1024
    finally:
        os.close(fd)
