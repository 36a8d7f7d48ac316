"""Entry points of other packages are found, and errors name the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.plugins import call_plugin, find_plugins, load_plugin

GROUP = "shardwise.tests"


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
    assert not find_plugins(GROUP)
    install(site, "good", "one = math:sqrt\ntwo = no_such_module:it")
    found = find_plugins(GROUP)
    assert sorted(found) == ["one", "two"]
    assert load_plugin(found["one"])(4) == 2
    with pytest.raises(
        sw.StateError, match=r"package good provides shardwise.tests 'two'.*no_such"
    ):
        load_plugin(found["two"])


def test_two_plugins_of_one_name_are_an_error(site: Path) -> None:
    install(site, "first", "one = math:sqrt")
    install(site, "second", "one = math:exp")
    with pytest.raises(
        sw.StateError, match=r"two packages provide .*first .*second|second .*first"
    ):
        find_plugins(GROUP)


def test_what_a_plugin_makes_is_checked(site: Path) -> None:
    install(site, "made", "one = math:sqrt\nother = math:log")
    found = find_plugins(GROUP)
    assert call_plugin(found["one"], float, 4) == 2
    with pytest.raises(sw.StateError, match=r"package made .* returned a float instead of a str"):
        call_plugin(found["one"], str, 4)
    with pytest.raises(sw.StateError, match=r"package made .* math:log failed: ValueError"):
        call_plugin(found["other"], float, 0)
