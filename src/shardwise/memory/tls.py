"""Mutual TLS between the nodes of a run."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from shardwise.errors import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for mutual TLS between agents and trainers.

    Every certificate signed by `ca` is accepted, whatever its name. So this authority must sign
    certificates only for the nodes of your runs.

    Args:
        certificate, key: the certificate of this node, and its key without a passphrase.
        ca: the certificates of the authorities that sign the other nodes' certificates.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]

    def for_client(self) -> ssl.SSLContext:
        """Return the context for connections to other nodes.

        Raises:
            StoreError: the files cannot be read, or do not belong together.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def for_server(self) -> ssl.SSLContext:
        """Return the context for connections from other nodes.

        Raises:
            StoreError: as for `for_client`.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def _context(self, side: int) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        given = f"Tls(certificate={self.certificate}, key={self.key}, ca={self.ca})"
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_passphrase)
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise StoreError(f"{given}: {error}") from error
        return context


def _no_passphrase() -> str:
    """Return an empty passphrase; without this, OpenSSL would ask for one on the terminal."""
    return ""
