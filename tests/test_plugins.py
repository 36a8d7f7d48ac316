"""Entry points of other packages are found, and errors name the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardwise as sw

GROUP = "shardwise.stores"


def install(folder: Path, package: str, entries: str) -> None:
    """Install a package that has entry points only."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return tmp_path


def test_plugins_are_imported_only_when_they_are_used(site: Path) -> None:
    install(site, "good", "one = store_of_good:open_it\ntwo = no_such_module:it")
    (site / "store_of_good.py").write_text(
        "from shardwise.ports.store import open_store\n"
        "def open_it(url):\n"
        "    return open_store('/' + url.partition('://')[2])\n"
    )
    sw.save(f"one:/{site}/saved", {"step": 7})
    assert sw.open(site / "saved")["step"] == 7
    assert "no_such_module" not in sys.modules
    with pytest.raises(
        sw.StateError, match=r"package good provides shardwise.stores 'two'.*no_such"
    ):
        sw.open("two://place")


def test_two_plugins_of_one_name_are_an_error(site: Path) -> None:
    install(site, "first", "one = math:sqrt")
    install(site, "second", "one = math:exp")
    with pytest.raises(
        sw.StateError, match=r"two packages provide .*first .*second|second .*first"
    ):
        sw.open("one://place")


def test_what_a_plugin_makes_is_checked(site: Path) -> None:
    install(site, "made", "one = builtins:len\nother = math:log")
    with pytest.raises(sw.StateError, match=r"package made .* returned an? int instead of a Store"):
        sw.open("one://place")
    with pytest.raises(sw.StateError, match=r"package made .* math:log failed: TypeError"):
        sw.open("other://place")
