"""The free files of a run: free slots of ranks, and spare files that the agent reuses."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.memory import records
from shardwise.memory.files import regular_files
from shardwise.memory.home import Run, SnapshotDirectory
from shardwise.memory.options import Memory
from shardwise.memory.records import rank_in_name

SLOT_SUFFIX, SPARE_SUFFIX = ".slot", ".spare"


def delete_free_slots(run: Run, is_kept: Callable[[int], bool]) -> None:
    """Delete the free slots of all ranks for which `is_kept` returns False."""
    for name in regular_files(run.free_directory):
        if name.endswith(SLOT_SUFFIX) and not is_kept(rank_in_name(name)):
            (run.free_directory / name).unlink(missing_ok=True)


def add_spare(run: Run, path: Path) -> None:
    """Keep a file that the agent made, so that the agent can reuse its memory."""
    path.rename(run.free_directory / f"{secrets.token_hex(8)}{SPARE_SUFFIX}")


def list_spares(run: Run) -> list[tuple[int, Path]]:
    """Return size and path of each spare file, by ascending size."""
    files = regular_files(run.free_directory)
    return sorted(
        (status.st_size, run.free_directory / name)
        for name, status in files.items()
        if name.endswith(SPARE_SUFFIX)
    )


def reuse_spare(run: Run, size: int, path: Path) -> None:
    """Move a spare file to `path`, where the agent will write a file of `size` bytes.

    Choose the smallest spare file that is large enough, or else the largest. Do nothing if there is
    no spare file, or `path` exists.
    """
    spares = list_spares(run)
    large = [spare for nbytes, spare in spares if nbytes >= size]
    small = [spare for nbytes, spare in reversed(spares) if nbytes < size]
    for spare in (*large, *small):
        if path.exists():
            return
        with suppress(FileNotFoundError):  # the whole run was removed
            spare.rename(path)


def delete_smallest_spares(run: Run, most: int) -> None:
    """Delete all but the `most` largest spare files."""
    spares = list_spares(run)
    for _, path in spares[: max(0, len(spares) - most)]:
        path.unlink(missing_ok=True)


def bytes_needed_for_others(bytes_per_rank: int, options: Memory, *, nodes: int) -> int:
    """Return the bytes of copies and parity that an agent stores for each rank of its node.

    All ranks are assumed to stage a similar number of bytes.

    Args:
        bytes_per_rank: the bytes that a rank stages.
        nodes: the number of nodes of the run.
    """
    if nodes < 2:
        return 0
    groups = -(-nodes // options.group)
    members = nodes // groups
    parity = min(options.parity, members - 1)
    copied = min(options.copies, nodes - 1) * bytes_per_rank
    return options.slots * (copied + parity * -(-bytes_per_rank // (members - parity)))


def bytes_stored_for_others(run: Run) -> int:
    """Return the bytes of copies, parity and spare files on a node, not counting slots."""
    total = sum(nbytes for nbytes, _ in list_spares(run))
    for step in run.steps():
        place = SnapshotDirectory(run, step)
        in_slots = {each.file.name for each in place.staged_files()}
        for ring_file in place.ring_files():
            in_slots |= {ring_file.file, ring_file.file.removeprefix(".")}
        total += sum(
            status.st_size
            for name, status in regular_files(place.path).items()
            if name.endswith(records.DATA_SUFFIXES) and name not in in_slots
        )
    return total
