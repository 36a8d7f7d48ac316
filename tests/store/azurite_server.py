"""Azurite, Microsoft's own server of Azure's blob storage for tests. It needs node.

The tests look for its program `azurite-blob` in PATH, and in `node_modules/.bin` of the repository,
where `make test-all` installs it:

    npm install --no-save --prefix . azurite
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.store.servers import free_ports, running, tool, wait_until_ready

REPOSITORY = Path(__file__).parents[2]
CONTAINER = "shardwise-tests"
REQUEST_SECONDS = 10.0


@dataclass(frozen=True)
class AzureServer:
    """A running server with one container.

    Attributes:
        endpoint: its URL, with the name of the account as path.
    """

    endpoint: str

    @property
    def origin(self) -> str:
        """The URL without a path."""
        return self.endpoint.rpartition("/")[0]

    @property
    def account(self) -> str:
        return self.endpoint.rpartition("/")[2]

    def behind(self, proxy: str) -> AzureServer:
        """Return the same server, reached through a proxy."""
        return AzureServer(f"{proxy}/{self.account}")

    def url(self, path: str, **options: str) -> str:
        """Return the URL of a path in the container, with further options of the store."""
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return f"az://{CONTAINER}/{path}?endpoint={self.endpoint}{query and '&'}{query}"

    def new_url(self, **options: str) -> str:
        """Return the URL of a path that no test has used."""
        return self.url(f"test-{secrets.token_hex(6)}/run", **options)

    def keys(self, url: str) -> list[str]:
        """Return the keys of all blobs below a URL."""
        return self._list(url, {})

    def unfinished_uploads(self, url: str) -> list[str]:
        """Return the keys of blobs of a test that have blocks, but do not exist.

        Args:
            url: what `new_url` returned to the test, or a URL below.
        """
        path = url.partition("?")[0].removeprefix(f"az://{CONTAINER}/")
        whole = f"az://{CONTAINER}/{path.partition('/')[0]}"
        blobs = self._list(whole, {})
        return [
            key for key in self._list(whole, {"include": "uncommittedblobs"}) if key not in blobs
        ]

    def uncommitted_blocks(self, key: str) -> int:
        """Return how many blocks of a blob were uploaded and not committed."""
        query = {"comp": "blocklist", "blocklisttype": "uncommitted"}
        try:
            answer = self.request("GET", f"{CONTAINER}/{key}", query)
        except urllib.error.HTTPError:  # there is no blob yet
            return 0
        return answer.count("<Block>")

    def _list(self, url: str, options: dict[str, str]) -> list[str]:
        prefix = url.partition("?")[0].removeprefix(f"az://{CONTAINER}").strip("/")
        prefix = prefix and f"{prefix}/"
        query = {"comp": "list", "prefix": prefix, "restype": "container", **options}
        listing = self.request("GET", CONTAINER, query)
        assert "<NextMarker/>" in listing or "<NextMarker />" in listing, "more than one page"
        return [name.removeprefix(prefix) for name in re.findall(r"<Name>(.*?)</Name>", listing)]

    def request(self, method: str, path: str, query: dict[str, str]) -> str:
        """Send a request without a body, signed with the key of the account."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed_headers = [f"{name}:{value}" for name, value in sorted(headers.items())]
        resource = [f"/{self.account}/{self.account}/{path}"]
        resource += [f"{name}:{value}" for name, value in sorted(query.items())]
        signature = self._sign([method, *[""] * 11, *signed_headers, *resource])
        headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        url = f"{self.endpoint}/{path}?{urllib.parse.urlencode(query)}"
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            return str(answer.read().decode())

    def access_signature(self, permissions: str) -> str:
        """Return a shared access signature of the container, which is valid for years."""
        end, version, resource = "2099-01-01T00:00:00Z", "2021-12-02", "c"
        place = f"/blob/{self.account}/{CONTAINER}"
        lines = [permissions, "", end, place, "", "", "", version, resource, *[""] * 7]
        query = {"sp": permissions, "se": end, "sv": version, "sr": resource}
        return urllib.parse.urlencode({**query, "sig": self._sign(lines)})

    def _sign(self, lines: list[str]) -> str:
        key = base64.b64decode(os.environ["AZURE_STORAGE_ACCOUNT_KEY"])
        return base64.b64encode(hmac.digest(key, "\n".join(lines).encode(), "sha256")).decode()


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """Azurite, with its data in a temporary directory; starts in about ten seconds."""
    pytest.importorskip("obstore", reason="this test needs obstore")
    folder = tmp_path_factory.mktemp("azurite")
    (port,) = free_ports(1)
    program = tool("azurite-blob", "azurite (npm)", REPOSITORY / "node_modules" / ".bin")
    command = [
        *[program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)],
        *["--silent", "--skipApiVersionCheck", "--disableTelemetry"],
    ]
    server = AzureServer(f"http://127.0.0.1:{port}/{os.environ['AZURE_STORAGE_ACCOUNT_NAME']}")
    with running(command, folder):
        wait_until_ready(lambda: server.request("PUT", CONTAINER, {"restype": "container"}))
        yield server
