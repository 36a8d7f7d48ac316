"""The store of docs/ports/store.md, as a package that somebody else has installed."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.ports.store import Store, StoreUnavailableError, open_store
from shardwise.testing.store_suite import StoreSuite

PAGE = Path(__file__).parents[2] / "docs" / "ports" / "store.md"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the page, which is installed with its entry point."""
    blocks = dict(re.findall(r"```(python|toml)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL))
    site = tmp_path_factory.mktemp("site")
    (site / "shelf.py").write_text(blocks["python"])
    info = site / "shelf-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    entry = blocks["toml"].replace(
        '[project.entry-points."shardwise.stores"]', "[shardwise.stores]"
    )
    (info / "entry_points.txt").write_text(entry.replace('"', ""))
    sys.path.insert(0, str(site))
    yield importlib.import_module("shelf")
    sys.path.remove(str(site))


@pytest.fixture
def url(shelf: Any) -> str:
    return f"shelf://main/{next(_numbers)}"


class TestShelf(StoreSuite):
    @pytest.fixture
    def store(self, shelf: Any, url: str) -> Store:
        store: Store = shelf.open_shelf(url)
        return store


class TestShelfByItsUrl(StoreSuite):
    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)


def test_a_run_and_its_mirror(url: str, tmp_path: Path) -> None:
    state = {"weight": torch.arange(100_000.0)}
    mirror = f"{url}-mirror"
    with sw.Checkpointer(tmp_path / "run", memory=None, mirror=mirror) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    assert [each.step for each in sw.list_checkpoints(mirror).checkpoints] == [1, 2]
    with sw.Checkpointer(url, memory=None, keep=sw.Keep(last=1)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state)
    loaded = {"weight": torch.zeros(100_000)}
    with sw.Checkpointer(url, memory=None) as checkpointer:
        assert checkpointer.restore(loaded) == 3
    assert torch.equal(loaded["weight"], state["weight"])
    assert torch.equal(sw.open(f"{mirror}/step-00000002")["weight"][:], state["weight"])
    with pytest.raises(sw.CheckpointExistsError):
        sw.save(f"{url}/step-00000003", state)


def test_an_outage_is_repeated(shelf: Any, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": torch.arange(10.0)}
    sw.save(url, state)
    read, failures = shelf.Shelf.read, [2]

    def fail_first(self: Store, key: str, *, limit: int) -> bytes:
        failures[0] -= 1
        if failures[0] >= 0:
            raise StoreUnavailableError("503 Slow Down")
        content: bytes = read(self, key, limit=limit)
        return content

    monkeypatch.setattr(shelf.Shelf, "read", fail_first)
    loaded = {"weight": torch.zeros(10)}
    sw.load(url, loaded)
    assert torch.equal(loaded["weight"], state["weight"])
    failures[0] = 2
    with pytest.raises(sw.StoreError, match="503"):
        sw.load(f"{url}?retry=0", loaded)


def test_secrets_and_unknown_options_are_refused(url: str) -> None:
    for option, message in (("password=x", "secret"), ("region=x", "unknown option")):
        with pytest.raises(sw.StoreError, match=message):
            open_store(f"{url}?{option}")
