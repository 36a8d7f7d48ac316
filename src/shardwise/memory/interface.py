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
    """Return an address as it is, or the address of the network interface of this name.

    Raises:
        StoreError: no such interface exists, it has no address, or other nodes cannot use the
            address.
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
            f"interface {interface!r}: other nodes cannot connect to this address: pass a unicast "
            "address, or a network interface, for example 'eth0'"
        )
    return str(address)


def served_address(info: AgentInfo) -> str:
    """Return the address in an agent's URL."""
    return urlsplit(info.url).hostname or ""


def refuse_unreachable(infos: Sequence[AgentInfo]) -> None:
    """Raise if the run has several hosts and an agent serves only its own.

    Raises:
        StoreError: an agent serves only its own host; the message says what to do.
    """
    hosts = sorted({info.host for info in infos})
    alone = [info for info in infos if serves_own_host_only(info)]
    if len(hosts) > 1 and alone:
        raise StoreError(
            f"this run has {len(hosts)} hosts ({', '.join(hosts[:4])}"
            f"{', …' if len(hosts) > 4 else ''}), but the agent of node {alone[0].node} serves "
            f"{served_address(alone[0])}, which no other host can reach: "
            "set Memory(interface=…) to this node's address in the network of the hosts, or to a "
            "network interface (for example 'eth0'), and stop the running agent: "
            f"kill {alone[0].process} on {alone[0].host}"
        )


def serves_own_host_only(info: AgentInfo) -> bool:
    """Return whether only its own host can reach an agent."""
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
    """Return an interface's IPv6 address from the kernel's list: address, index, prefix, scope,
    flags, name."""
    lines = _IPV6_ADDRESSES.read_text().splitlines() if _IPV6_ADDRESSES.exists() else []
    for address, _, _, scope, _, device in map(str.split, lines):
        if device == name and scope == GLOBAL_SCOPE:
            return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
    raise StoreError(f"interface {name!r} has no address that other nodes could reach: use another")
