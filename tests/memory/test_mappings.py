"""Files that stay mapped: they are the same memory again, and go when they are removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import CorruptionError
from shardwise.memory.seal import MappedFiles

MEGABYTE = 1 << 20


@pytest.fixture
def mapped_files() -> Iterator[MappedFiles]:
    """Of nothing yet."""
    mapped_files = MappedFiles()
    yield mapped_files
    mapped_files.close()


def maps_of(path: Path) -> int:
    """How many mappings this process has of what lies, or lay, at a path."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(line.removesuffix(" (deleted)").endswith(f" {path}") for line in lines)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_that_comes_back_is_the_same_memory(
    tmp_path: Path, mapped_files: MappedFiles
) -> None:
    path, moved = tmp_path / "slot", tmp_path / "data"
    path.write_bytes(bytes(MEGABYTE))
    before = mapped_files.map(path, MEGABYTE)
    fds = descriptors()
    path.rename(moved)
    os.truncate(moved, 1000)
    assert mapped_files.map(moved, 1000).ctypes.data == before.ctypes.data
    os.truncate(moved, MEGABYTE)
    moved.write_bytes(bytes(range(256)) * (MEGABYTE // 256))
    after = mapped_files.map(moved, MEGABYTE)
    assert after.ctypes.data == before.ctypes.data
    assert after.tobytes() == moved.read_bytes()
    after[0] = 7
    assert moved.read_bytes()[0] == 7
    assert descriptors() == fds


def test_a_file_that_has_grown_is_mapped_anew(tmp_path: Path, mapped_files: MappedFiles) -> None:
    path = tmp_path / "slot"
    path.write_bytes(b"1" * 10)
    mapped_files.map(path, 10)
    fds = descriptors()
    path.write_bytes(b"2" * MEGABYTE)
    assert mapped_files.map(path, MEGABYTE).tobytes() == b"2" * MEGABYTE
    assert descriptors() == fds


def test_the_memory_of_a_file_that_was_removed_is_given_back(
    tmp_path: Path, mapped_files: MappedFiles
) -> None:
    fds = descriptors()
    path, stays = tmp_path / "slot", tmp_path / "stays"
    for each in (path, stays):
        each.write_bytes(bytes(MEGABYTE))
        mapped_files.map(each, MEGABYTE)
    mapped_files.unmap_removed()
    assert maps_of(path) == maps_of(stays) == 1
    path.unlink()
    mapped_files.unmap_removed()
    assert (maps_of(path), maps_of(stays)) == (0, 1)
    mapped_files.close()
    assert (maps_of(stays), descriptors()) == (0, fds)


def test_a_file_of_another_size_is_refused(tmp_path: Path, mapped_files: MappedFiles) -> None:
    path = tmp_path / "slot"
    path.write_bytes(b"12345")
    fds = descriptors()
    for size in (4, 6):
        with pytest.raises(CorruptionError, match="slot has 5 bytes"):
            mapped_files.map(path, size)
    assert descriptors() == fds
