"""Connect the ranks of a process group of `torch.distributed`, whatever its backend."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.group import TIMEOUT
from shardwise.kernel.errors import LostRankError
from shardwise.parts.ranks.connections import close_in_forked_children
from shardwise.parts.ranks.tree import TreeGroup
from shardwise.parts.ranks.tree_rendezvous import nothing

CONNECT_TIMEOUT = timedelta(minutes=1)
"""How long ranks that have met may take to connect."""


def connect_process_group(
    group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None
) -> TreeGroup:
    """Connect the ranks of a process group, for which the group itself is not needed.

    Args:
        group: the ranks.
        purpose: tells groups of the same ranks apart.
        timeout: the longest time that ranks wait for each other; by default, that of the group.

    Raises:
        ShardwiseError: as for `TreeGroup`.
    """
    names = [purpose, group.group_name]
    if group is not dist.group.WORLD:
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        names.append(hashlib.blake2b(ranks.encode(), digest_size=8).hexdigest())
    store = dist.distributed_c10d.PrefixStore(
        "/".join(["shardwise", *names]), dist.distributed_c10d._get_default_store()
    )
    patience = timeout_of(group) if timeout is None else timeout
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return TreeGroup(store, rank, size, timeout=patience, check=_make_check(group, patience))


def connect_default_group(purpose: str, timeout: timedelta) -> TreeGroup | None:
    """Connect the ranks of the default process group; return None if there is no such group.

    Children that are forked later, such as the workers of data loaders, do not keep the connections
    open when this process dies.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = connect_process_group(dist.distributed_c10d._get_default_group(), purpose, timeout)
    close_in_forked_children(group)
    return group


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the ranks of a process group wait for each other."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(found := getattr(options, "_timeout", None), timedelta):
            return found
    return TIMEOUT


def _make_check(group: dist.ProcessGroup, timeout: timedelta) -> Callable[[Deadline], None]:
    """Return a function that raises if a rank of a process group dies before it is connected.

    Only connections tell that a rank is dead, and gloo has some, if the group uses it. Ranks that
    have met by a barrier then connect within `CONNECT_TIMEOUT`. Without gloo, ranks that wait for a
    dead rank give up at the deadline.
    """
    if torch.device("cpu") not in group._device_types or group.size() == 1:
        return nothing
    options = dist.BarrierOptions()
    options.timeout, options.device, options.asyncOp = timeout, torch.device("cpu"), True

    met: Deadline | None = None
    rank = group.rank()
    try:
        work = group.barrier(options)  # here, so that all ranks call it equally often
    except RuntimeError as error:
        raise _lost_rank(error, rank) from error.with_traceback(None)

    def check(deadline: Deadline) -> None:
        nonlocal met
        try:
            if met is None and work.is_completed():
                work.wait()
                met = Deadline(CONNECT_TIMEOUT.total_seconds())
        except RuntimeError as error:
            raise _lost_rank(error, rank) from error.with_traceback(None)
        if met is not None and met.seconds_left() < deadline.seconds_left():
            deadline.extend(met.seconds_left() - deadline.seconds_left())

    return check


def _lost_rank(error: RuntimeError, rank: int) -> LostRankError:
    # The traceback must go: its frames refer to the group, and would keep connections open.
    return LostRankError(
        "connecting the ranks (a rank died or failed: look for the first error in the logs of all "
        "ranks; the rank listed here only noticed it)",
        {rank: str(error).splitlines()[0]},
    )
