"""The ranks of a run find their nodes, and the run that they are."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import replace

import msgspec

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group, own_address
from shardwise.errors import MismatchError, StoreError
from shardwise.memory.home import Home, new_run
from shardwise.memory.interface import refuse_unreachable
from shardwise.memory.notes import Card
from shardwise.memory.options import Memory
from shardwise.memory.spawn import agent_of
from shardwise.store import Store

RUN = "run.json"
LARGEST_RUN = 4096


class Meeting(msgspec.Struct, array_like=True):
    """Which run this is, its nodes, and the node of each rank."""

    run: str
    nodes: list[Card]
    node_of: list[str]


def reaching(options: Memory, group: Group) -> Memory:
    """The options, with the interface on which others reach this node, if they need it.

    All ranks together.
    """

    def answer(said: list[bytes]) -> bytes:
        return b"1" if len(set(said)) > 1 else b""

    several = exchange(group, "finding hosts", lambda: socket.gethostname().encode(), answer)
    return (
        replace(options, interface=own_address()) if several and not options.interface else options
    )


def meet(root: Store, options: Memory, group: Group) -> tuple[Home, Meeting]:
    """Find this node's home and agent, which is started if there is none, and the others'.

    Raises:
        MismatchError: ranks do not ask for the same protection.
        StoreError: an agent does not come to life, or cannot be reached by the others.
    """
    homes: list[Home] = []
    protection = f"copies={options.copies}, parity={options.parity}, group={options.group}"

    def speak() -> bytes:
        homes.append(Home(options.dir))
        return msgspec.msgpack.encode((protection, agent_of(homes[0], options)))

    def answer(said: list[bytes]) -> bytes:
        heard = [msgspec.msgpack.decode(each, type=tuple[str, Card]) for each in said]
        asked = [f"rank {rank}: Memory({each})" for rank, (each, _) in enumerate(heard)]
        if len({each for each, _ in heard}) > 1:
            raise MismatchError("ranks do not ask for the same protection:", asked)
        cards = [card for _, card in heard]
        refuse_unreachable(cards)
        nodes = {card.node: card for card in cards}
        meeting = Meeting(run_of(root), list(nodes.values()), [card.node for card in cards])
        return msgspec.msgpack.encode(meeting)

    reply = exchange(group, "finding the agents of the nodes", speak, answer)
    return homes[0], msgspec.msgpack.decode(reply, type=Meeting)


def run_of(root: Store) -> str:
    """The id of the run that persists to a root; a new one, if the root is new.

    It lies in the root, so that a run that is begun anew, in a root that was emptied, never takes
    snapshots of the one before for its own.
    """
    for _ in range(2):
        with suppress(FileNotFoundError):
            data = root.read(RUN, limit=LARGEST_RUN)
            try:
                return msgspec.json.decode(data, type=dict[str, str])["run"]
            except (msgspec.DecodeError, KeyError) as error:
                raise StoreError(f"{root}: {RUN} is damaged; remove it") from error
        with suppress(FileExistsError):
            root.publish(RUN, msgspec.json.encode({"run": new_run()}), replace=False)
    raise StoreError(f"{root}: {RUN} comes and goes")
