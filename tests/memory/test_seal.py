"""Checksums of staged files: the same by one process as by several, also if some of these fail."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from shardwise.manifest.checksums import BLOCK, block_checksums, block_count, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import seal as seal_module
from shardwise.memory.seal import map_file, seal
from shardwise.store.store import Buffer

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
@pytest.mark.parametrize("processes", [None, 1, 2, 3, 8])
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
