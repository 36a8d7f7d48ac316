"""The user's options for snapshots in memory: `Memory`, and `Tls` for encrypted connections."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Literal

from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.errors import StoreError
from shardwise.kernel.events import repr_of_set_fields

DEFAULT_DIRECTORY = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for mutual TLS between agents and trainers.

    Every certificate that `ca` signed is accepted, for any name. So this authority must sign
    certificates only for the nodes of your runs.

    Args:
        certificate: the certificate of this node.
        key: the private key of the certificate, without a passphrase.
        ca: the certificates of the authorities that sign the other nodes' certificates.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]

    def for_client(self) -> ssl.SSLContext:
        """Return the context for connections to other nodes.

        Raises:
            StoreError: a file cannot be read, or the key does not belong to the certificate.
        """
        return self._make_context(ssl.PROTOCOL_TLS_CLIENT)

    def for_server(self) -> ssl.SSLContext:
        """Return the context for connections from other nodes.

        Raises:
            StoreError: as for `for_client`.
        """
        return self._make_context(ssl.PROTOCOL_TLS_SERVER)

    def _make_context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            # Without a passphrase, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise StoreError(
                f"Tls(certificate={self.certificate}, key={self.key}, ca={self.ca}): cannot use "
                f"these files: {error}; pass readable PEM files, and the key of this certificate "
                "without a passphrase"
            ) from error
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Options for snapshots in the memory of the nodes.

    Args:
        snapshot_every: take a snapshot at steps that are a multiple of this number. 0: only at
            steps that are saved to the root.
        slots: the number of committed snapshots to keep; at least 2 with `copies` or `parity`. Each
            rank needs memory for one more snapshot: the one that is being written.
        overlap: let `save` return before the copy is complete. The next step of each optimizer in
            the state waits for the copy. Anything else that changes the state (buffers in a
            forward pass, parameter averages) must call `handle.staged()` first.
        dir: the directory for snapshots on each node: a memory file system, or a local directory.
        copies: the number of other nodes that store a copy of each node's data.
        parity: the number of nodes of a group that may be lost. Parity needs
            `parity / (group - parity)` times the memory of the data. Use either copies or parity.
        group: the largest number of nodes that protect each other by parity.
        domain: the failure domain of this node, for example its rack. None: the node itself.
        interface: the address at which this node's agent serves other nodes, or the name of a
            network interface such as "eth0". None: if the run has several hosts, the network of the
            process group's rendezvous; otherwise only this host. An agent that is already running
            must serve the same address.
        tls: certificates for encrypted connections between nodes. None: unencrypted.
        start_agent: start an agent if none runs. If False, wait for one that you start.
        rescue: if a trainer ends without closing its Checkpointer, the agents persist the newest
            snapshot at once.
        max_bytes_per_second: how many bytes per second an agent copies to storage at most. None: no
            limit.
        when_full: the reaction if all slots are taken: "skip" the snapshot, or "wait" for a slot. A
            save to the root always waits, and fails if no slot becomes free.
        wait: the seconds to wait for a slot, and for a node that does not answer. Even with a
            smaller number, an agent has at least five seconds to answer a rank that waits for a
            save.

    Raises:
        TypeError: a number is not an integer.
        ValueError: a number is out of range, both copies and parity are given, or one of them is
            given with slots=1.
    """

    snapshot_every: int = 1
    slots: int = 2
    overlap: bool = False
    dir: str = DEFAULT_DIRECTORY
    copies: int = 0
    parity: int = 0
    group: int = 8
    domain: str | None = None
    interface: str | None = None
    tls: Tls | None = None
    start_agent: bool = True
    rescue: bool = True
    max_bytes_per_second: int | None = None
    when_full: Literal["skip", "wait"] = "skip"
    wait: float = 60.0

    __repr__ = repr_of_set_fields

    def __post_init__(self) -> None:
        minima = {"snapshot_every": 0, "slots": 1, "copies": 0, "parity": 0, "group": 2}
        for name, minimum in minima.items():
            number = check_integer(f"Memory({name}", getattr(self, name), minimum)
            object.__setattr__(self, name, number)
        if self.max_bytes_per_second is not None and self.max_bytes_per_second < 1 << 20:
            raise ValueError(
                f"Memory(max_bytes_per_second={self.max_bytes_per_second}): must be at least "
                f"{1 << 20}"
            )
        if self.copies and self.parity:
            raise ValueError(
                f"Memory(copies={self.copies}, parity={self.parity}): use one of them, not both"
            )
        if self.slots < 2 and (self.copies or self.parity):
            raise ValueError(
                f"Memory(slots={self.slots}, copies={self.copies}, parity={self.parity}): copies "
                "and parity need slots=2 or more, because a protected snapshot stays until the "
                "next one is protected"
            )
        if self.parity >= self.group:
            raise ValueError(
                f"Memory(parity={self.parity}, group={self.group}): parity must be less than group"
            )
        if self.when_full not in ("skip", "wait"):
            raise ValueError(f"Memory(when_full={self.when_full!r}): must be 'skip' or 'wait'")
        if not self.wait > 0:
            raise ValueError(f"Memory(wait={self.wait}): must be more than 0 seconds")
