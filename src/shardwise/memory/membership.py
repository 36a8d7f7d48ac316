"""How the ranks of a run find their nodes, agents and lineage."""

from __future__ import annotations

import socket
from dataclasses import replace

import msgspec

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group, own_address
from shardwise.memory.home import Home
from shardwise.memory.interface import refuse_unreachable
from shardwise.memory.lineage import Lineage, lineage_of
from shardwise.memory.options import Memory
from shardwise.memory.records import AgentInfo
from shardwise.memory.spawn import ensure_agent
from shardwise.store import Store


class Membership(msgspec.Struct, array_like=True):
    """The run's lineage, its nodes, and the node of each rank."""

    lineage: Lineage
    nodes: list[AgentInfo]
    node_of: list[str]


def with_interface(options: Memory, group: Group) -> Memory:
    """Return the options with an interface that other hosts can reach, if the run has several
    hosts.

    All ranks call this together.
    """

    def answer(said: list[bytes]) -> bytes:
        return b"1" if len(set(said)) > 1 else b""

    several = exchange(group, "finding hosts", lambda: socket.gethostname().encode(), answer)
    return (
        replace(options, interface=own_address()) if several and not options.interface else options
    )


def join(root: Store, options: Memory, group: Group) -> tuple[Home, Membership]:
    """Return this node's home and the membership; start the node's agent if none runs.

    Raises:
        StoreError: the root cannot be read, an agent does not start, or other nodes cannot reach
            one.
    """
    homes: list[Home] = []

    def speak() -> bytes:
        homes.append(Home(options.dir))
        return msgspec.msgpack.encode(ensure_agent(homes[0], options))

    def answer(said: list[bytes]) -> bytes:
        infos = [msgspec.msgpack.decode(each, type=AgentInfo) for each in said]
        refuse_unreachable(infos)
        nodes = {info.node: info for info in infos}
        membership = Membership(
            lineage_of(root), list(nodes.values()), [info.node for info in infos]
        )
        return msgspec.msgpack.encode(membership)

    reply = exchange(group, "finding the agents of the nodes", speak, answer)
    return homes[0], msgspec.msgpack.decode(reply, type=Membership)
