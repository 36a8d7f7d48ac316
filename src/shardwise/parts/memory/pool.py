"""The pool of a run on one node: free files in a memory file system, which are used repeatedly.

The pages of a file are allocated once, because that takes longer than to copy data into them. The
name of a free file says who may take it: `rank-00003-<id>` becomes the data file of rank 3,
`ring-00003-<id>` a copy or parity that rank 3 makes for other nodes, and `agent-<id>` one that the
agent makes. Whoever takes a file moves it into the directory of a snapshot. Until it is complete,
its name there begins with a dot. When the snapshot is freed, the file returns to the pool.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.kernel.engine.buffers import allocate_pages
from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.files import opened, read_record, regular_files
from shardwise.parts.memory.records import DATA_SUFFIXES, RankPart, is_rank_record, rank_in_name

RANK, AGENT = "rank", "agent"
PAGE_SIZE = mmap.PAGESIZE
STAT_BLOCK = 512  # the unit of st_blocks, in bytes


def rank_owner(rank: int) -> str:
    """Return the owner of the files that a rank copies its own data to."""
    return f"{RANK}-{rank:05d}"


def ring_owner(rank: int) -> str:
    """Return the owner of the files in which a rank makes copies or parity for other nodes."""
    return f"ring-{rank:05d}"


@dataclass(frozen=True, slots=True)
class Pool:
    """The free files of a run. `directory` is their directory, which need not exist."""

    directory: Path

    def files(self, owner: str = "") -> list[tuple[int, Path]]:
        """Return the allocated bytes and the path of each free file, the smallest first.

        Args:
            owner: return only the files of this owner, or of owners of this kind.
        """
        files = regular_files(self.directory).items()
        return sorted(
            (status.st_blocks * STAT_BLOCK, self.directory / name)
            for name, status in files
            if name.startswith(f"{owner}-") or not owner
        )

    def in_order(self, owner: str, nbytes: int) -> list[Path]:
        """Return the free files of an owner, the best for `nbytes` bytes first.

        This is the smallest file that is large enough, or else the largest: `allocate` enlarges it.
        """
        files = self.files(owner)
        large = [path for allocated, path in files if allocated >= nbytes]
        small = [path for allocated, path in files if allocated < nbytes]
        return [*large, *reversed(small)]

    def take(self, owner: str, nbytes: int, path: Path) -> None:
        """Move the best free file of an owner to `path`, if there is one. Threads may do so."""
        for each in self.in_order(owner, nbytes):
            with suppress(FileNotFoundError):  # another thread has taken it
                each.rename(path)
                return

    def give(self, owner: str, path: Path) -> None:
        """Move a file to the pool."""
        path.rename(self.new_path(owner))

    def new_path(self, owner: str) -> Path:
        """Return a new path in the pool, whose directory is created in that of the run."""
        self.directory.mkdir(exist_ok=True)
        return self.directory / f"{owner}-{secrets.token_hex(4)}"

    def shrink(self, ranks: Collection[int] = (), most: int | None = 0) -> None:
        """Keep the files of `ranks`, and the `most` largest of the agent. Delete all others.

        Args:
            most: None to keep all files of the agent.
        """
        paths = {path for _, path in self.files()}
        of_agent = [path for _, path in self.files(AGENT)]
        kept = set(of_agent[-most:] if most else of_agent if most is None else ())
        owners = [owner for rank in ranks for owner in (rank_owner(rank), ring_owner(rank))]
        for path in paths - kept - {path for owner in owners for _, path in self.files(owner)}:
            path.unlink(missing_ok=True)


def allocate(path: Path, size: int) -> None:
    """Give a file this size, and all its pages, so that writes neither fail nor wait for them.

    Raises:
        OSError: there are too few pages. The file is unchanged; a new one is deleted.
    """
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        before = os.fstat(fd).st_size
        try:
            os.ftruncate(fd, size)
            if os.fstat(fd).st_blocks * STAT_BLOCK < size:
                allocate_pages(fd, size)
        except OSError:
            os.ftruncate(fd, before)
            if not before:
                path.unlink(missing_ok=True)
            raise


def round_to_pages(size: int) -> int:
    """Return a number of bytes, rounded up to whole pages."""
    return -(-size // PAGE_SIZE) * PAGE_SIZE


def owners_of_files(directory: Path) -> dict[str, str]:
    """Return the owner of each data file, copy and parity in the directory of a snapshot.

    Files that are being written are included. The records of ranks say whose files they are. If the
    record of a rank is damaged, nobody knows this: the agent gets the files, and the rank allocates
    new ones.
    """
    names: set[str] = set()
    with suppress(FileNotFoundError, NotADirectoryError):  # freed meanwhile
        names.update(os.listdir(directory))
    owners = {name: AGENT for name in names if name.endswith(DATA_SUFFIXES)}
    for record in filter(is_rank_record, names):
        rank = rank_in_name(record)
        with suppress(StoreError):
            if part := read_record(directory / record, RankPart):
                own = set() if part.file is None else _before_and_after(part.file.name)
                begun = {n for n in owners if n.lstrip(".").startswith(f"{rank_owner(rank)}.")}
                made = [m for m in part.made if _before_and_after(m.file).isdisjoint(begun)]
                claimed = set().union(*(_before_and_after(each.name) for each in made))
                owners |= dict.fromkeys(own & names, rank_owner(rank))
                owners |= dict.fromkeys(begun | (claimed & names), ring_owner(rank))
    return owners


def _before_and_after(name: str) -> set[str]:
    """Return the names of a file before and after it is complete."""
    return {f".{name}", name}
