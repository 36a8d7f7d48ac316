"""Every byte of a checkpoint against its checksums."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shardwise.engine.arena import Arena
from shardwise.engine.datareader import DataReader
from shardwise.engine.opened import Opened
from shardwise.events import Recorder


def verify_files(opened: Opened, arena: Arena, recorder: Recorder) -> int:
    """Read all of every file; an event for each, named by the file.

    Returns:
        The bytes that were checked.

    Raises:
        CorruptionError: a file is missing or cut off, or bytes are not those that were saved.
    """
    total = 0
    with ThreadPoolExecutor(arena.threads, "shardwise-verify") as pool:
        for entry in opened.manifest.files:
            with recorder.stage(entry.name, entry.size):
                reader = DataReader(opened.store, entry)

                def check(
                    low: int, reader: DataReader = reader, end: int = entry.checksums_at
                ) -> None:
                    with arena.buffer() as buffer:
                        reader.read(low, min(low + arena.chunk, end), buffer)

                try:
                    for _ in pool.map(check, range(0, entry.checksums_at, arena.chunk)):
                        pass
                finally:
                    reader.close()
            total += entry.size
    return total
