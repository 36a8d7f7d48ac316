"""Files of the newest checkpoint in storage, which the agent reads before the training starts.

<home>/prefetched/.incomplete/<data file>   a file that is being read
<home>/prefetched/<run>/<data file>         a complete file

A restore reads these files first, and all other files from the root. Then the restore removes the
directory, which also stops the agent's reads.
"""

from __future__ import annotations

import logging
import re
import secrets
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from shardwise.engine.copy_file import Throttle, copy_verified
from shardwise.errors import FormatError, ShardwiseError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, FileEntry, decode_manifest
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.memory.home import Home, Run, SnapshotDirectory
from shardwise.memory.lineage import read_lineage
from shardwise.retention import committed_steps
from shardwise.store import LocalStore, Store, lock_for_reading, open_store

PREFETCH_DIRECTORY = "prefetched"
INCOMPLETE_DIRECTORY = ".incomplete"
FRACTION_OF_FREE_MEMORY = 0.5
KEPT_SECONDS = 1800.0
FILES_AT_ONCE = 4
log = logging.getLogger("shardwise.agent")


def parse_ranks(ranks: str | None) -> frozenset[int] | None:
    """Return the ranks of a text such as "8-15"; None for all ranks.

    Raises:
        StoreError: the ranks have another form.
    """
    if ranks is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", ranks)
    if match is None:
        raise StoreError(f"--ranks {ranks}: expected the ranks of this node, such as 8-15")
    return frozenset(range(int(match[1]), int(match[2] or match[1]) + 1))


class _PrefetchStopped(Exception):  # noqa: N818
    """A restore has begun, or the agent ends."""


class Prefetcher:
    """Reads the newest checkpoint of a root into the memory of this node, in a thread.

    The files take at most half of the free memory. Files that do not fit are left out. If this node
    has a snapshot of the same or a newer step, nothing is read. After half an hour without a
    restore, the files are removed.

    Args:
        home: the home of the node.
        root: the root of the run, a path or URL.
        ranks: read the files that these ranks wrote; None for all files.
        kept_seconds: the seconds after which the files are removed.
    """

    def __init__(
        self,
        home: Home,
        root: str,
        ranks: frozenset[int] | None = None,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        self._home = home
        self._root, self._ranks = root, ranks
        self._kept_seconds = kept_seconds
        self._incomplete = home.path / PREFETCH_DIRECTORY / INCOMPLETE_DIRECTORY
        self._inode = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._incomplete.mkdir(parents=True)
        self._inode = self._incomplete.stat().st_ino
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop reading, between two chunks, and remove the files; return whether it has stopped."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.read()
            self._stopping.wait(self._kept_seconds)
        except (_PrefetchStopped, ShardwiseError, OSError) as error:
            if not self._is_stopped():
                log.warning("cannot prefetch from %s: %s", self._root, error)
        discard_prefetched(self._home.path)

    def read(self) -> None:
        """Read the files.

        Raises:
            ShardwiseError: the checkpoint is damaged, or the root cannot be read.
            OSError: the storage failed.
        """
        root = open_store(self._root)
        lineage, steps = read_lineage(root), committed_steps(root)
        if lineage is None or not steps:
            log.info("%s has no checkpoint to prefetch", root)
            return
        run, step = self._home.run(lineage.run), steps[-1]
        if any(
            each >= step and SnapshotDirectory(run, each).is_committed() for each in run.steps()
        ):
            return
        source = root.at(step_directory(step))
        try:
            manifest = decode_manifest(source.read(MANIFEST, limit=LARGEST_MANIFEST))
        except FormatError as error:
            raise FormatError(f"{source}: {error}") from error
        target = _prefetch_directory(run)
        target.mkdir()
        with lock_for_reading(source, MANIFEST) as held:
            files = self._choose_files(manifest.files) if held else []
            self._copy_files(source, files, target)
        nbytes = sum(file.size for file in files)
        log.info("prefetched %d files of step %d of %s: %d bytes", len(files), step, root, nbytes)

    def _choose_files(self, files: Sequence[FileEntry]) -> list[FileEntry]:
        """Return the files to read that fit into the free memory."""
        bytes_left = shutil.disk_usage(self._home.path).free * FRACTION_OF_FREE_MEMORY
        ranks, chosen = self._ranks, []
        for file in files:
            if (ranks is None or file.rank in ranks) and file.size <= bytes_left:
                chosen.append(file)
                bytes_left -= file.size
        return chosen

    def _is_stopped(self) -> bool:
        """Return whether the agent ends, or a restore has removed the directory."""
        try:
            is_same = self._incomplete.stat().st_ino == self._inode
        except FileNotFoundError:
            is_same = False
        return self._stopping.is_set() or not is_same

    def _copy_files(self, source: Store, files: Sequence[FileEntry], target: Path) -> None:
        failed = threading.Event()

        def check() -> None:
            if failed.is_set() or self._is_stopped():
                raise _PrefetchStopped

        def copy(file: FileEntry) -> None:
            check()
            copy_verified(source, file, LocalStore(self._incomplete), Throttle(None), check)
            (self._incomplete / file.name).rename(target / file.name)

        with ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-prefetch") as pool:
            copies = [pool.submit(copy, file) for file in files]
            try:
                for each in copies:
                    each.result()
            except BaseException:
                failed.set()
                pool.shutdown(cancel_futures=True)
                raise


def prefetched_files(run: Run) -> Store | None:
    """Return the files of a run that the agent of this node has prefetched, if any."""
    path = _prefetch_directory(run)
    return LocalStore(path) if path.is_dir() else None


def discard_prefetched(home: Path) -> None:
    """Remove all prefetched files from a home. This also stops an agent that reads files."""
    renamed = home / f".{PREFETCH_DIRECTORY}.{secrets.token_hex(4)}"
    with suppress(FileNotFoundError):
        (home / PREFETCH_DIRECTORY).rename(renamed)  # at once, so that no file is added
        shutil.rmtree(renamed, ignore_errors=True)


def _prefetch_directory(run: Run) -> Path:
    return run.path.parents[1] / PREFETCH_DIRECTORY / run.name
