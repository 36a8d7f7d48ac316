"""How the ranks of a load read the bytes that they need.

A load plans which byte ranges each rank needs. A read strategy decides which rank reads them, and
how they get from one rank to another. `ReadAlone` is the simplest one: each rank reads all
that it needs. `shardwise.parts.sharing` lets one rank read what several need.

A package provides a strategy by an entry point of the group `shardwise.read_strategies`: a function
that takes the group of ranks and the user's choice of `read_once`, and returns a `ReadStrategy`, or
None to leave this load to others. In a load on two or more ranks, each rank calls this function.
It must decide the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, runtime_checkable

from shardwise.kernel.engine.group import Group as Group
from shardwise.kernel.engine.load import RankReads as RankReads
from shardwise.kernel.engine.load import ReadAlone as ReadAlone
from shardwise.kernel.engine.rounds import Round as Round

GROUP = "shardwise.read_strategies"


@runtime_checkable
class ReadStrategy(Protocol):
    """Reads the bytes that the ranks of a load need."""

    def agree(self, reads: RankReads, group: Group, cleanup: ExitStack) -> Callable[[], None]:
        """Agree with the other ranks on who reads what. All ranks call this method together.

        Args:
            reads: what this rank needs.
            group: the ranks. They exchange messages in a `Round`, which raises the failure of a
                rank on all ranks.
            cleanup: closes what the strategy opens, after all ranks have finished.

        Returns:
            A function that fills the tensors of this rank, and adds to `reads.bytes_read` and
            `reads.bytes_received`. All ranks call it at the same time. If it fails on one rank, the
            others must fail too, and not wait.

        Raises:
            ShardwiseError: on all ranks.
        """
        ...
