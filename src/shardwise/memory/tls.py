"""Encryption between the nodes of a run: each shows a certificate, and wants to see one."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass

from shardwise.errors import StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM files for mutual TLS between agents and trainers.

    Every certificate that `ca` signed is accepted, whatever name it has. So this authority must
    sign certificates for the nodes of your runs only.

    Args:
        certificate, key: the certificate of this node, and its key without a passphrase.
        ca: the certificates of the authorities that sign the other nodes' certificates.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    ca: str | os.PathLike[str]

    def for_client(self) -> ssl.SSLContext:
        """How to call others.

        Raises:
            StoreError: the files cannot be read, or do not belong together.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def for_server(self) -> ssl.SSLContext:
        """How to be called by others.

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
            context.load_cert_chain(self.certificate, self.key, password=_none)
            context.load_verify_locations(self.ca)
        except (OSError, ValueError) as error:
            raise StoreError(f"{given}: {error}") from error
        return context


def _none() -> str:
    """No passphrase: without this, OpenSSL would ask for one on the terminal."""
    return ""
