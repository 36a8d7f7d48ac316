"""A certificate authority for tests of TLS, made by the command `openssl`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from shardwise.parts.memory.options import Tls

NEW = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"


class Authority:
    """Signs certificates of nodes. Its files and theirs are in one directory."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._make("ca")

    def issue(self, name: str) -> Tls:
        """Return a new certificate for a node."""
        ca = self.folder / "ca.pem"
        extra = ["-CA", str(ca), "-CAkey", str(self.folder / "ca.key")]
        self._make(name, *extra, "-addext", "basicConstraints=critical,CA:FALSE")
        return Tls(certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key", ca=ca)

    def _make(self, name: str, *extra: str) -> None:
        files = ["-keyout", str(self.folder / f"{name}.key"), "-out"]
        command = [*NEW.split(), "-subj", f"/CN={name}", *files, str(self.folder / f"{name}.pem")]
        subprocess.run([*command, *extra], check=True, capture_output=True)
