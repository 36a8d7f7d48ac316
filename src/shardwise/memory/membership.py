"""The ranks of a run find their nodes, and the run that they are."""

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
    """Which run this is, its nodes, and the node of each rank."""

    lineage: Lineage
    nodes: list[AgentInfo]
    node_of: list[str]


def with_interface(options: Memory, group: Group) -> Memory:
    """The options, with the interface on which others reach this node, if they need it.

    All ranks together.
    """

    def answer(said: list[bytes]) -> bytes:
        return b"1" if len(set(said)) > 1 else b""

    several = exchange(group, "finding hosts", lambda: socket.gethostname().encode(), answer)
    return (
        replace(options, interface=own_address()) if several and not options.interface else options
    )


def join(root: Store, options: Memory, group: Group) -> tuple[Home, Membership]:
    """Find this node's home and agent, which is started if there is none, and the others'.

    Raises:
        StoreError: the root cannot be read; or an agent does not come to life, or cannot be
            reached by the others.
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
