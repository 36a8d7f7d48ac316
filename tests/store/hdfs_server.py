"""A NameNode and a DataNode of Hadoop 2.7, from the jars in the sources of pyspark 2.4.8.

Later pyspark packages have only Hadoop's client. The jars lie in the folder that the environment
variable SHARDWISE_HDFS_JARS names, or in pytest's cache, to which they are downloaded (220 MB).
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

JARS = "SHARDWISE_HDFS_JARS"
DOWNLOAD_TIMEOUT = 240.0
START_TIMEOUT = 60.0
MAIN = "org.apache.hadoop.hdfs.server"
OPENED = ("java.lang", "java.nio", "java.net", "java.util", "sun.nio.ch")


def find_jars(config: pytest.Config) -> Path:
    """Return the folder with the jars. Skip the test if there are none, and no way to get them."""
    if not shutil.which("java"):
        pytest.skip("HDFS needs java, for example Debian's openjdk-17-jre-headless")
    if folder := os.environ.get(JARS):
        if not list(Path(folder).glob("hadoop-hdfs-*.jar")):
            pytest.fail(f"{JARS}={folder}: there is no hadoop-hdfs-*.jar")
        return Path(folder)
    jars = config.cache.mkdir("hdfs-jars")
    if not list(jars.glob("hadoop-hdfs-*.jar")):
        _download(jars)
    return jars


def _download(jars: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder, "constraints.txt")
        constraint.write_text(
            "pypandoc<1.6\n", encoding="utf-8"
        )  # what the set-up of pyspark 2.4.8 calls
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "pyspark"]
        try:
            subprocess.run(
                [*download, "--dest", folder, "pyspark==2.4.8"],
                env={
                    **os.environ,
                    "PIP_CONSTRAINT": str(constraint),
                    "PIP_BUILD_CONSTRAINT": str(constraint),  # from pip 25.3 on
                },
                timeout=DOWNLOAD_TIMEOUT,
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"pyspark 2.4.8, which has the jars of HDFS, cannot be downloaded: {error}")
        with tarfile.open(Path(folder, "pyspark-2.4.8.tar.gz")) as archive:
            for member in archive:
                path = Path(member.name)
                source = archive.extractfile(member) if path.suffix == ".jar" else None
                if source is not None:
                    partial = jars / f"{path.name}.part"
                    with partial.open("wb") as target:
                        shutil.copyfileobj(source, target)
                    partial.rename(jars / path.name)


@dataclass
class Hdfs:
    """A running HDFS.

    Attributes:
        url: its URL.
        namenode: the process of its NameNode.
    """

    url: str
    namenode: subprocess.Popen[bytes]
    _jars: Path
    _folder: Path

    def restart_namenode(self) -> None:
        """Start the NameNode after it was killed. It is not ready at once."""
        self.namenode.wait()
        self.namenode = _start(self._jars, self._folder, "namenode.NameNode")


@contextmanager
def running_hdfs(jars: Path, folder: Path) -> Iterator[Hdfs]:
    """Run HDFS on loopback.

    Args:
        jars: the folder with the jars.
        folder: an empty folder for the files of HDFS.
    """
    url = f"hdfs://127.0.0.1:{_free_port()}"
    _configure(folder / "conf", url)
    _start(jars, folder, "namenode.NameNode", "-format", "-nonInteractive").wait(START_TIMEOUT)
    namenode = _start(jars, folder, "namenode.NameNode")
    datanode = _start(jars, folder, "datanode.DataNode")
    hdfs = Hdfs(url, namenode, jars, folder)
    try:
        _await(url, [namenode, datanode], folder)
        yield hdfs
    finally:
        for server in (hdfs.namenode, datanode):
            server.kill()
            server.wait()


def _start(jars: Path, folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    opens = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
    path = f"{folder / 'conf'}:{jars}/*"
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            ["java", "-Xmx256m", *opens, "-cp", path, f"{MAIN}.{name}", *arguments],
            stdout=log,
            stderr=log,
        )


def _configure(conf: Path, url: str) -> None:
    # HDFS looks for its web pages. It starts with empty ones.
    for name in ("hdfs", "datanode"):
        (conf / "webapps" / name / "WEB-INF").mkdir(parents=True)
    free = "127.0.0.1:0"
    sites = {
        "core-site.xml": {"fs.defaultFS": url},
        "hdfs-site.xml": {
            "dfs.replication": "1",
            "dfs.webhdfs.enabled": "false",  # needs a library that pyspark lacks
            "dfs.namenode.name.dir": str(conf.parent / "name"),
            "dfs.datanode.data.dir": str(conf.parent / "data"),
            "dfs.namenode.http-address": free,
            "dfs.datanode.address": free,
            "dfs.datanode.http.address": free,
            "dfs.datanode.ipc.address": free,
        },
    }
    for name, values in sites.items():
        properties = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in values.items()
        )
        (conf / name).write_text(f"<configuration>{properties}</configuration>")


def _await(url: str, servers: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until a file can be written."""
    from hdfs_native import Client

    quickly = {"dfs.client.failover.max.attempts": "1"}
    deadline = time.monotonic() + START_TIMEOUT
    problem: Exception | None = None
    for number in itertools.count():
        if time.monotonic() > deadline or any(server.poll() is not None for server in servers):
            break
        try:
            with Client(url, quickly).create(f"/ready-{number}") as file:
                file.write(b"ready")
            return
        except (OSError, RuntimeError) as error:
            problem = error
            time.sleep(0.5)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
    pytest.fail(f"HDFS did not start: {problem}\n{logs}")


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
