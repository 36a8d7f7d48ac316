"""The user's options for snapshots in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.engine.options import whole_number
from shardwise.memory.tls import Tls

DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Options for snapshots in the memory of the nodes.

    Args:
        snapshot_every: take a snapshot at steps that are a multiple of this. 0: only at steps that
            are saved to the root.
        slots: how many committed snapshots to keep. Each rank needs memory for one more, which is
            being written.
        overlap: let `save` return before the copy is complete. The next step of each optimizer in
            the state waits for the copy. Anything else that changes the state (buffers in a
            forward pass, parameter averages) must call `handle.staged()` first.
        dir: the directory for snapshots on each node: a memory file system, or a local directory.
        copies: how many other nodes store a copy of each node's data.
        parity: how many nodes of a group may be lost at once. Parity takes
            `parity / (group - parity)` of the memory of the data. Use either copies or parity.
        group: the largest number of nodes that protect each other by parity.
        domain: the failure domain of this node, for example its rack. None: the node itself.
        interface: where this node's agent serves other nodes: an address, or the name of a network
            interface such as "eth0". None: if the run has several hosts, the network of the
            process group's rendezvous; otherwise only this host. An agent that is already running
            must serve that address.
        tls: certificates for encrypted connections between nodes. None: unencrypted.
        start_agent: start an agent if none runs. If False, wait for one that you start.
        rescue: if a trainer ends without closing its Checkpointer, the agents persist the newest
            snapshot at once.
        budget: how many bytes per second an agent may copy to storage. None: no limit.
        when_full: what to do if all slots are taken: "skip" the snapshot, or "wait" for a slot. A
            save that is to be persisted always waits, and fails if no slot becomes free.
        wait: how many seconds to wait for a slot, and for a node that does not answer.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, or both copies and parity are given.
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
            raise ValueError(f"Memory(budget={self.budget}): must be at least 1 MiB a second")
        if self.copies and self.parity:
            raise ValueError("Memory: use copies or parity, not both")
        if self.parity >= self.group:
            raise ValueError(
                f"Memory(parity={self.parity}, group={self.group}): parity must be less than group"
            )
        if self.when_full not in ("skip", "wait"):
            raise ValueError(f"Memory(when_full={self.when_full!r}): must be 'skip' or 'wait'")
        if not self.wait > 0:
            raise ValueError(f"Memory(wait={self.wait}): must be more than 0 seconds")
