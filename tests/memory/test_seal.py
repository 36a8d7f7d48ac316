"""Sealing: files stay mapped, and their checksums are the same by one process as by several."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from shardwise.kernel.errors import CorruptionError
from shardwise.kernel.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory import seal as seal_module
from shardwise.parts.memory.seal import MappedFiles, map_file, seal
from tests.breadth import mostly_long

# Files that stay mapped: they are the same memory again, and go when they are removed.

MEGABYTE = 1 << 20


@pytest.fixture
def mapped_files() -> MappedFiles:
    """Of nothing yet."""
    return MappedFiles()


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
    stays.unlink()
    mapped_files.unmap_removed()
    assert (maps_of(stays), descriptors()) == (0, fds)


def test_a_file_of_another_size_is_refused(tmp_path: Path, mapped_files: MappedFiles) -> None:
    path = tmp_path / "slot"
    path.write_bytes(b"12345")
    fds = descriptors()
    for size in (4, 6):
        with pytest.raises(CorruptionError, match="slot has 5 bytes"):
            mapped_files.map(path, size)
    assert descriptors() == fds


# Checksums of staged files: the same by one process as by several, also if some of these fail.

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def has_valid_checksums(data: Buffer, entry: FileEntry) -> bool:
    """Whether the table at the end was sealed, and has the checksums of all blocks."""
    end = entry.checksums_at
    table = data[end : end + 4 * block_count(end)]
    expected = block_checksums(data[:end]).astype("<u4").view(np.uint8)
    return crc32(table) == entry.checksums_crc32 and bool((table == expected).all())


def staged(path: Path, nbytes: int) -> tuple[Buffer, FileEntry]:
    """A mapped file of random bytes, with room for its checksums, and its entry."""
    content = np.random.default_rng(nbytes).integers(256, size=nbytes, dtype=np.uint8)
    size = nbytes + 4 * block_count(nbytes)
    path.write_bytes(content.tobytes() + bytes(size - nbytes))
    entry = FileEntry(path.name, 0, size, 0, nbytes, nbytes, 0)
    return map_file(path, size, writable=True), entry


@pytest.mark.parametrize("blocks", [0.001, 1, 1.5, 2, 7, 63.5, 130])
@pytest.mark.parametrize("processes", mostly_long([None, 1, 2, 3, 8], [None, 3]))
def test_processes_share_the_checksums(
    processes: int | None, blocks: float, tmp_path: Path
) -> None:
    data, entry = staged(tmp_path / "f", int(blocks * BLOCK))
    sealed = seal(data, entry, processes)
    expected = block_checksums(data[: entry.checksums_at]).astype("<u4").tobytes()
    assert data[entry.checksums_at :].tobytes() == expected
    assert has_valid_checksums(map_file(tmp_path / "f", entry.size), sealed)


@pytest.mark.parametrize("fault", ["killed", "raises", "hangs", "no fork"])
def test_what_a_process_does_not_finish_is_done_by_this_one(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, entry = staged(tmp_path / "f", 40 * BLOCK + 1)
    this, write = os.getpid(), seal_module._write_checksums

    def fail(*args: object) -> None:
        if os.getpid() != this:
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hangs":
                signal.pause()
            raise OSError("failed")
        write(*args)  # type: ignore[arg-type]

    def refuse() -> int:
        raise OSError("no process")

    monkeypatch.setattr(seal_module, "_write_checksums", fail)
    monkeypatch.setattr(seal_module, "CHILD_TIMEOUT", 0.2)
    if fault == "no fork":
        monkeypatch.setattr(os, "fork", refuse)
    sealed = seal(data, entry, 4)
    assert has_valid_checksums(data, sealed)
