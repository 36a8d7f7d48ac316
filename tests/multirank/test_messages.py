"""What ranks say to each other arrives as it was said, however long it is."""

from __future__ import annotations

import torch.distributed as dist

from shardwise.engine.group import FIRST_SIZE, TorchGroup
from tests.tools.gang import Gang

LENGTHS = [0, 1, FIRST_SIZE - 1, FIRST_SIZE, FIRST_SIZE + 1, 3 * FIRST_SIZE, 100_000]


def said(rank: int, length: int) -> bytes:
    """A message that no other rank has."""
    return bytes((rank + i) % 251 for i in range(length))


def talk() -> list[tuple[list[bytes], bytes, bytes]]:
    """What this rank hears, by each verb, of messages of each length; others have the next one."""
    world = dist.group.WORLD
    assert world is not None
    group = TorchGroup(world)
    heard = []
    for i in range(len(LENGTHS)):
        lengths = [LENGTHS[(i + rank) % len(LENGTHS)] for rank in range(group.size)]
        mine = said(group.rank, lengths[group.rank])
        parts = [said(rank, length) for rank, length in enumerate(lengths)]
        gathered = group.gather(mine)
        scattered = group.scatter(parts if group.rank == 0 else [])
        heard.append((gathered, scattered, group.broadcast(mine if group.rank == 0 else b"")))
    return heard


def test_messages_of_all_lengths_arrive_whole(gang: Gang) -> None:
    world = 3
    for rank, heard in enumerate(gang.run(talk, world=world)):
        for i, (gathered, scattered, broadcast) in enumerate(heard):
            lengths = [LENGTHS[(i + each) % len(LENGTHS)] for each in range(world)]
            everyone = [said(each, length) for each, length in enumerate(lengths)]
            assert gathered == (everyone if rank == 0 else [])
            assert scattered == everyone[rank]
            assert broadcast == everyone[0]
