"""Who the agent of a home is to others. It lies in the home, so that the next one is the same.

What other nodes and older records know of an agent is then true of its successor too.
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
    """The name of a node, which no other has."""
    return _kept(home.path / "node", f"{socket.gethostname()}-{secrets.token_hex(4)}")


def secret_of(home: Home, given: Path | None) -> str:
    """What others must know to be served: the content of the file that was given, or one's own.

    Raises:
        StoreError: the file cannot be read, or has no secret that can be sent.
    """
    if given is None:
        return _kept(home.path / "agent.secret", secrets.token_urlsafe(32))
    try:
        with given.open("rb") as file:
            secret = file.read(LONGEST_SECRET + 2).decode(errors="replace").strip()
    except OSError as error:
        raise StoreError(f"the secret in {given} cannot be read: {error}") from error
    if not _SECRET.fullmatch(secret):
        raise StoreError(
            f"{given} holds no secret: {SHORTEST_SECRET} to {LONGEST_SECRET} characters of ASCII "
            "without spaces, such as `openssl rand -hex 32` prints"
        )
    return secret


def run_token(secret: str, run: str) -> str:
    """What others must know to be served the snapshots of one run; the secret does not follow."""
    return hmac.new(secret.encode(), f"run {run}".encode(), "sha256").hexdigest()


def last_port(home: Home) -> int:
    """The port of the agent before, 0 if there was none."""
    with suppress(FileNotFoundError, ValueError):
        port = int(_port(home).read_text())
        return port if 0 < port < 1 << 16 else 0
    return 0


def remember_port(home: Home, port: int) -> None:
    """Have the next agent take the same port, if it is free then."""
    _write(_port(home), str(port))


def _port(home: Home) -> Path:
    return home.path / "agent.port"


def _kept(path: Path, new: str) -> str:
    """What a file says; `new`, from now on, if there is none."""
    with suppress(FileNotFoundError):
        if said := path.read_text():
            return said
    _write(path, new)
    return new


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and for nobody else."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    temporary.rename(path)
