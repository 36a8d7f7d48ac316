"""The name, secret and port of a node's agent.

They are stored in the home. So the next agent has the same, and what other nodes and older records
say about the previous agent stays true.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory.home import Home

SHORTEST_SECRET, LONGEST_SECRET = 16, 512
_SECRET = re.compile(rf"[!-~]{{{SHORTEST_SECRET},{LONGEST_SECRET}}}")


def node_name(home: Home) -> str:
    """Return the unique name of the node; create one if it has none."""
    return _kept(home.path / "node", f"{socket.gethostname()}-{secrets.token_hex(4)}")


def secret_of(home: Home, given: Path | None) -> str:
    """Return the secret that clients must present: from the given file, or the home's own.

    Raises:
        StoreError: the file cannot be read, or does not contain a valid secret.
    """
    if given is None:
        return _kept(home.path / "agent.secret", secrets.token_urlsafe(32))
    try:
        with given.open("rb") as file:
            secret = file.read(LONGEST_SECRET + 2).decode(errors="replace").strip()
    except OSError as error:
        raise StoreError(f"{given}: the secret cannot be read: {error}") from error
    if not _SECRET.fullmatch(secret):
        raise StoreError(
            f"{given} holds no secret: {SHORTEST_SECRET} to {LONGEST_SECRET} characters of ASCII "
            "without spaces. Create one with `openssl rand -hex 32`"
        )
    return secret


def run_token(secret: str, run: str) -> str:
    """Return the token that gives access to one run; it does not reveal the secret."""
    return hmac.new(secret.encode(), f"run {run}".encode(), "sha256").hexdigest()


def last_port(home: Home) -> int:
    """Return the port of the previous agent, or 0 if there was none."""
    with suppress(FileNotFoundError, ValueError):
        port = int(_port(home).read_text())
        return port if 0 < port < 1 << 16 else 0
    return 0


def remember_port(home: Home, port: int) -> None:
    """Record the port, so that the next agent uses it if it is free."""
    _write(_port(home), str(port))


def _port(home: Home) -> Path:
    return home.path / "agent.port"


def _kept(path: Path, new: str) -> str:
    """Return the content of a file; write `new` first if the file does not exist."""
    with suppress(FileNotFoundError):
        if said := path.read_text():
            return said
    _write(path, new)
    return new


def _write(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.rename(path)
