"""Which part of each global batch belongs to a rank."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.kernel.engine.check_numbers import check_integer

MOST_BATCHES_AHEAD = 4096
"""If a training loop takes more batches than this without `advance()`, the call is missing."""


def data_rank(caller: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the number of ranks among which a global batch is divided.

    Args:
        caller: the name of the class, for error messages.
        rank, world_size: as the user passed them. If both are None, those of the default process
            group are used; without one, rank 0 of 1.

    Raises:
        TypeError, ValueError: only one of both is given, or they are not integers in range.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(
            f"{caller}(rank={rank}, world_size={world_size}): pass both, or neither for the "
            "default process group"
        )
    if rank is None or world_size is None:
        has_group = dist.is_available() and dist.is_initialized()
        return (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    world_size = check_integer(f"{caller}(world_size", world_size)
    rank = check_integer(f"{caller}(rank", rank, least=0)
    if rank >= world_size:
        raise ValueError(
            f"{caller}(rank={rank}, world_size={world_size}): expected a rank from 0 to "
            f"{world_size - 1}"
        )
    return rank, world_size


def share_of(whole: range, rank: int, world_size: int) -> range:
    """Return a rank's part of a range. Parts are in order of rank; their sizes differ by ≤ 1."""
    return whole[len(whole) * rank // world_size : len(whole) * (rank + 1) // world_size]
