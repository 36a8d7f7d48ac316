"""How much memory a node takes for what it keeps for others, beside what its ranks stage into."""

from __future__ import annotations

from contextlib import suppress

from shardwise.memory import records
from shardwise.memory.home import Place, Run
from shardwise.memory.node.spares import spares
from shardwise.memory.options import Memory


def needed_for_others(share: int, options: Memory, *, nodes: int) -> int:
    """What the agents make, over the network, for each rank that stages so many bytes.

    A node keeps for others as much as others keep of its own, all shares being about alike.
    """
    if nodes < 2:
        return 0
    members = nodes // -(-nodes // options.group)
    parity = min(options.parity, members - 1)
    copies = min(options.copies, nodes - 1) * share
    return options.slots * (copies + parity * -(-share // (members - parity)))


def taken_for_others(run: Run) -> int:
    """What of that a node has already: what is in no slot."""
    total = sum(nbytes for nbytes, _ in spares(run))
    for step in run.steps():
        place = Place(run, step)
        in_slots = {each.file.name for each in place.staged()}
        for kept in place.kept():
            in_slots |= {kept.file, kept.file.removeprefix(".")}
        for name in place.named(""):
            if name.endswith(records.DATA) and name not in in_slots:
                with suppress(FileNotFoundError):
                    total += (place.path / name).stat().st_size
    return total
