"""How to keep snapshots in memory, as a user says it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.engine.options import whole_number
from shardwise.memory.tls import Tls

DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Snapshots in the memory of the nodes.

    Args:
        snapshot_every: take a snapshot at every step that is a multiple of this; 0: only of steps
            that are saved to the root.
        slots: how many committed snapshots are kept; one more is being written.
        overlap: copy while the training goes on, up to the next step of an optimizer that is in the
            state, which waits for it. Whatever else changes the state before (buffers in a forward
            pass, averages) must wait for `handle.staged()`.
        dir: where each node keeps them: a memory file system, or a directory of a local disk.
        copies: how many further nodes keep a copy of what a node holds.
        parity: how many nodes of a group may be lost at once, by redundancy that takes
            `parity / (group - parity)` of the memory; instead of copies.
        group: how many nodes protect each other by parity.
        domain: what fails together with this node, such as its rack; the node itself if None.
        interface: where a node's agent serves the others: an address, or the name of a network
            interface, such as "eth0". If None, an agent that is started serves on the network over
            which the ranks have met, or its own host only if that has all ranks; and one that
            runs serves where it does.
        tls: by what nodes know each other, over connections that are encrypted; in clear if None.
        start_agent: start an agent where none lives; otherwise wait for one that others start.
        rescue: when a trainer ends without having closed its Checkpointer, the agents persist the
            newest snapshot at once.
        budget: bytes a second that an agent may copy to storage; no bound if None.
        when_full: if all slots are taken: leave this snapshot out, or wait for one first. A save
            that is to be persisted waits, and fails if none becomes free.
        wait: seconds to wait for a slot, and for a node that does not answer.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or copies and parity are both asked for.
    """

    snapshot_every: int = 1
    slots: int = 2
    overlap: bool = False
    dir: str = DIRECTORY
    copies: int = 0
    parity: int = 0
    group: int = 8
    domain: str | None = None
    interface: str | None = None
    tls: Tls | None = None
    start_agent: bool = True
    rescue: bool = True
    budget: int | None = None
    when_full: Literal["skip", "wait"] = "skip"
    wait: float = 60.0

    def __post_init__(self) -> None:
        least = {"snapshot_every": 0, "slots": 1, "copies": 0, "parity": 0, "group": 2}
        for name, at_least in least.items():
            number = whole_number(f"Memory({name}", getattr(self, name), at_least)
            object.__setattr__(self, name, number)
        if self.budget is not None and self.budget < 1 << 20:
            raise ValueError(f"Memory(budget={self.budget}): at least 1 MiB a second is needed")
        if self.copies and self.parity:
            raise ValueError("Memory: copies or parity, not both")
        if self.parity >= self.group:
            raise ValueError(f"Memory(parity={self.parity}) needs a group of more nodes than that")
        if self.when_full not in ("skip", "wait"):
            raise ValueError(f"Memory(when_full={self.when_full!r}): 'skip' or 'wait'")
        if not self.wait > 0:
            raise ValueError(f"Memory(wait={self.wait}): seconds, more than 0")
