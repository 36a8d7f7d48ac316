"""Fixtures for all tests. The workers of `gang` stay warm for the whole session."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import forked_agents
from tests.breadth import LONG_EXAMPLES
from tests.forked_agents import forking_agents
from tests.tools.gang import Gang

# Time limits fail on busy machines.
settings.register_profile("shardwise", deadline=None, max_examples=50)
settings.register_profile("long", settings.get_profile("shardwise"), max_examples=LONG_EXAMPLES)
settings.load_profile("shardwise")
# With another number of threads, torch computes other bits, and its threads do not survive a fork.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# The processes that tests start run the same source as the tests, also in a second work tree.
ROOT = Path(__file__).parents[1]
SOURCES = [str(ROOT / "src"), str(ROOT / "packages" / "shardwise-legacy" / "src")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*SOURCES, os.environ.get("PYTHONPATH")]))
# Tests talk to servers of this machine only. Without credentials, clients would ask the network.
os.environ.update(
    AWS_ACCESS_KEY_ID="tests",
    AWS_SECRET_ACCESS_KEY="not-a-secret",
    AWS_DEFAULT_REGION="us-east-1",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    AZURE_STORAGE_ACCOUNT_NAME="devstoreaccount1",
    AZURE_STORAGE_ACCOUNT_KEY=(
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
    ),
)
for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
    os.environ.pop(name, None)
PRELOAD = ("tests.preloaded",)
SLOW = ("adapters", "faults", "integrations", "memory", "tiers/test_kill", "formats/matrix")


@pytest.fixture(scope="session", autouse=True)
def _forked_agents() -> Iterator[None]:
    with forking_agents():
        yield


@pytest.fixture
def spawned_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the agents of a test as users do, by their command."""
    monkeypatch.delenv(forked_agents.ADDRESS)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory outside of /dev/shm, where simulated hosts mount their memory."""
    if not tmp_path.is_relative_to("/dev/shm"):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="shardwise-tests-") as directory:
        yield Path(directory)


@pytest.fixture(scope="session")
def gang() -> Iterator[Gang]:
    """A gang of up to four workers. Each starts when a test first needs it."""
    with Gang(4, preload=PRELOAD) as gang:
        yield gang


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, which then leaves alone what the imports have made."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "gang" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if item.name == "test_a_damaged_file_raises_nothing_else":  # it opens hundreds of files
            item.add_marker(pytest.mark.timeout(900))
    if hasattr(config, "workerinput"):  # of several workers, none has a slow file left at the end
        folders = [str(Path(__file__).parent / name) for name in SLOW]
        folders.append(str(ROOT / "packages"))
        items.sort(key=lambda item: not any(str(item.path).startswith(each) for each in folders))
