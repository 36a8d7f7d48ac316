"""The address on which an agent serves other nodes, and whether they can reach it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from shardwise.errors import StoreError
from shardwise.memory.records import AgentInfo

LOOPBACK = "127.0.0.1"
GLOBAL_SCOPE = "00"
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def address_of(interface: str) -> str:
    """The address that is meant: it itself, or that of a network interface of this name.

    Raises:
        StoreError: there is no such interface, it has no address, or others could not use it.
    """
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        address = ipaddress.ip_address(_address_of_device(interface))
    if (
        address.is_unspecified
        or address.is_multicast
        or (address.version == 6 and address.is_link_local)
    ):
        raise StoreError(
            f"interface {interface!r}: other nodes cannot connect to this address: give a unicast "
            "address, or a network interface such as 'eth0'"
        )
    return str(address)


def served_address(info: AgentInfo) -> str:
    """The address in the URL of a info."""
    return urlsplit(info.url).hostname or ""


def refuse_unreachable(infos: Sequence[AgentInfo]) -> None:
    """Raise if the agents of several hosts cannot be reached by each other.

    Raises:
        StoreError: some serve only their own host; says what to do.
    """
    hosts = sorted({info.host for info in infos})
    alone = [info for info in infos if serves_own_host_only(info)]
    if len(hosts) > 1 and alone:
        raise StoreError(
            f"this run has {len(hosts)} hosts ({', '.join(hosts[:4])}"
            f"{', …' if len(hosts) > 4 else ''}), but the agent of node {alone[0].node} serves "
            f"{served_address(alone[0])}, which no other host can reach: "
            "set Memory(interface=…) to this node's address in the network of the hosts, or to a "
            "network interface (such as 'eth0'), and end the agent that runs already: "
            f"kill {alone[0].process} on {alone[0].host}"
        )


def serves_own_host_only(info: AgentInfo) -> bool:
    """Whether the agent of a info can be reached from its own host alone."""
    try:
        return ipaddress.ip_address(served_address(info)).is_loopback
    except ValueError:
        return False


def _address_of_device(name: str) -> str:
    known = [each for _, each in socket.if_nameindex()]
    if name not in known:
        raise StoreError(
            f"interface {name!r} is neither an address nor a network interface of "
            f"{socket.gethostname()}, which has {', '.join(known)}"
        )
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return _ipv6_of_device(name)
    return socket.inet_ntop(socket.AF_INET, answer[20:24])


def _ipv6_of_device(name: str) -> str:
    """What the kernel lists: address, index, prefix, scope, flags, name."""
    lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
    for address, _, _, scope, _, device in map(str.split, lines):
        if device == name and scope == GLOBAL_SCOPE:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise StoreError(f"interface {name!r} has no address that other nodes could reach")
