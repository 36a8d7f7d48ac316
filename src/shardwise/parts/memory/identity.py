"""The name, secret, port and address of a node's agent.

The home stores the name, the secret and the port. The next agent uses the same values, because
other nodes and older records refer to them.
"""

from __future__ import annotations

import fcntl
import hmac
import ipaddress
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import LocalStore
from shardwise.kernel.store.local_files import write_atomically
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.records import AgentInfo

METRICS_SCOPE = "metrics"
METRICS_TOKEN_FILE = "metrics.token"
SHORTEST_SECRET, LONGEST_SECRET = 16, 512
_SECRET = re.compile(rf"[!-~]{{{SHORTEST_SECRET},{LONGEST_SECRET}}}")
_READABLE = re.compile(r"[!-.0-~]+")  # without spaces and slashes
_PORT_FILE = "agent.port"
LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def read_or_create_node_name(home: Home) -> str:
    """Return the unique name of the node. It is created on the first call."""
    return _read_or_create(home.path / "node", f"{socket.gethostname()}-{secrets.token_hex(4)}")


def read_or_create_secret(home: Home, secret_file: Path | None) -> str:
    """Return the secret that clients of the agent must present.

    Args:
        secret_file: the file with the secret; None for a generated secret, stored in the home.

    Raises:
        StoreError: the file cannot be read, or does not contain a valid secret.
    """
    if secret_file is None:
        return _read_or_create(home.path / "agent.secret", secrets.token_urlsafe(32))
    try:
        with secret_file.open("rb") as file:
            secret = file.read(LONGEST_SECRET + 2).decode(errors="replace").strip()
    except OSError as error:
        raise StoreError(
            f"{secret_file}: cannot read the secret: {error.strerror}; pass a readable file with "
            "--secret-file, or omit the option"
        ) from error
    if not _SECRET.fullmatch(secret):
        raise StoreError(
            f"{secret_file}: the file does not contain a secret of {SHORTEST_SECRET} to "
            f"{LONGEST_SECRET} ASCII characters without spaces; create one with "
            "`openssl rand -hex 32`"
        )
    return secret


def write_metrics_token(home: Home, secret: str) -> None:
    """Write the token that allows reading the metrics of this node, for Prometheus."""
    with write_atomically(home.path / METRICS_TOKEN_FILE) as file:
        file.write(make_run_token(secret, METRICS_SCOPE).encode())


def make_run_token(secret: str, run: str) -> str:
    """Return a token that allows reading one run, and does not reveal the secret."""
    return hmac.new(secret.encode(), f"run {run}".encode(), "sha256").hexdigest()


def info_for_run(info: AgentInfo, run: str) -> AgentInfo:
    """Return the address of an agent with a token that allows reading one run, not its secret."""
    return msgspec.structs.replace(info, token=make_run_token(info.token, run))


def previous_port(home: Home) -> int:
    """Return the port of the previous agent, or 0 if there was none."""
    with suppress(FileNotFoundError, ValueError):
        port = int(LocalStore(home.path).read(_PORT_FILE, limit=LONGEST_SECRET))
        return port if 0 < port < 1 << 16 else 0
    return 0


def record_port(home: Home, port: int) -> None:
    """Record the port, so that the next agent uses it if it is free."""
    write_record(home.path / _PORT_FILE, str(port).encode())


def _read_or_create(path: Path, new: str) -> str:
    """Return the content of a file; if the file is missing, empty or damaged, write `new` first."""
    with suppress(FileNotFoundError):
        content = LocalStore(path.parent).read(path.name, limit=LONGEST_SECRET)
        if _READABLE.fullmatch(text := content.decode(errors="replace")):
            return text
    write_record(path, new.encode())
    return new


def resolve_interface(interface: str) -> str:
    """Return the address of a network interface. If `interface` is an address, return it.

    Raises:
        StoreError: no such interface exists, or it has no address that other nodes can connect to.
    """
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        address = ipaddress.ip_address(_address_of_interface(interface))
    if (
        address.is_unspecified
        or address.is_multicast
        or (address.version == 6 and address.is_link_local)
    ):
        raise StoreError(
            f"interface {interface!r}: other nodes cannot connect to {address}; pass a unicast "
            "address, or the name of a network interface such as 'eth0'"
        )
    return str(address)


def served_address(info: AgentInfo) -> str:
    """Return the address in an agent's URL."""
    return urlsplit(info.url).hostname or ""


def refuse_unreachable_agents(infos: Sequence[AgentInfo]) -> None:
    """Raise if the run has several hosts, and an agent serves only its own host.

    Raises:
        StoreError: names the agent, and says what to do.
    """
    hosts = sorted({info.host for info in infos})
    local = next((info for info in infos if serves_own_host_only(info)), None)
    if len(hosts) > 1 and local is not None:
        raise StoreError(
            f"this run has {len(hosts)} hosts ({', '.join(hosts[:4])}"
            f"{', …' if len(hosts) > 4 else ''}), but the agent of node {local.node} serves "
            f"{served_address(local)}, which no other host can reach: "
            "set Memory(interface=…) to this node's address in the network of the hosts, or to a "
            "network interface (for example 'eth0'), and stop the running agent: "
            f"kill {local.process} on {local.host}"
        )


def serves_own_host_only(info: AgentInfo) -> bool:
    """Return whether an agent can be reached from its own host only."""
    try:
        return ipaddress.ip_address(served_address(info)).is_loopback
    except ValueError:
        return False


def _address_of_interface(name: str) -> str:
    """Return the IPv4 address of a network interface."""
    names = [each for _, each in socket.if_nameindex()]
    if name not in names:
        raise StoreError(
            f"interface {name!r} is neither an address nor a network interface of "
            f"{socket.gethostname()}: pass an address, or one of {', '.join(names)}"
        )
    request = struct.pack("256s", name.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection:
        try:
            answer = fcntl.ioctl(connection.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            raise StoreError(
                f"interface {name!r} has no IPv4 address: pass another interface, or its IPv6 "
                "address"
            ) from error
    return socket.inet_ntop(socket.AF_INET, answer[20:24])
