"""What ranks say to each other arrives as it was said, however long it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import shardwise as sw
from shardwise.ports.read_strategy import Group, RankReads, ReadAlone
from tests.tools.gang import Gang

FIRST_SIZE = 1016
"""The number of bytes of a message that one collective sends, with its length."""
LENGTHS = [0, 1, FIRST_SIZE - 1, FIRST_SIZE, FIRST_SIZE + 1, 3 * FIRST_SIZE, 100_000]
Heard = list[tuple[bytes, bytes]]


def said(rank: int, length: int) -> bytes:
    """A message that no other rank has."""
    return bytes((rank + i) % 251 for i in range(length))


class Talking(ReadAlone):
    """Reads alone, after the ranks have sent each other messages."""

    def __init__(self) -> None:
        self.heard: Heard = []

    def agree(self, reads: RankReads, group: Group, cleanup: ExitStack) -> Callable[[], Any]:
        self.heard = talk(group)
        return super().agree(reads, group, cleanup)


def load(path: str) -> Heard:
    """What a read strategy hears during a load."""
    sw.save(path, {"t": 1})
    strategy = Talking()
    with patch("shardwise.kernel.loading._choose_strategy", lambda *_: strategy):
        sw.load(path, {"t": 0})
    return strategy.heard


def add(messages: list[bytes]) -> bytes:
    """The sum of each byte of some messages, of which the shorter ones end in zeros."""
    longest = max(map(len, messages))
    padded = [np.frombuffer(each.ljust(longest, b"\0"), np.uint8) for each in messages]
    return np.add.reduce(padded, dtype=np.uint8).tobytes()


def talk(group: Group) -> Heard:
    """What this rank hears, by each verb, of messages of each length; others have the next one."""
    heard = []
    for i in range(len(LENGTHS)):
        lengths = [LENGTHS[(i + rank) % len(LENGTHS)] for rank in range(group.size)]
        mine = said(group.rank, lengths[group.rank])
        together = group.reduce(mine, add)
        heard.append((together, group.broadcast(mine if group.rank == 0 else b"")))
    return heard


def test_messages_of_all_lengths_arrive_whole(gang: Gang, tmp_path: Path) -> None:
    world = 3
    for rank, heard in enumerate(gang.run(load, str(tmp_path / "it"), world=world)):
        for i, (together, broadcast) in enumerate(heard):
            lengths = [LENGTHS[(i + each) % len(LENGTHS)] for each in range(world)]
            everyone = [said(each, length) for each, length in enumerate(lengths)]
            assert together == (add(everyone) if rank == 0 else b"")
            assert broadcast == everyone[0]
