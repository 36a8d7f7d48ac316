"""The site: its navigation is complete, links and pictures are right, and it needs no network."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import unicodedata
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import shardwise as sw
import shardwise.data
from tests.docs.blocks import DOCS, ROOT

SITE: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(DOCS.rglob("*.md"))
OUTSIDE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
FROM_OUTSIDE = {
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "examples/notebook.md": "examples/notebook.ipynb",
}
"""Pages that docs/site_hooks.py makes, each with its file of the repository."""

PICTURES = DOCS / "images"
SECTIONS = re.compile(r"^#{1,6} (.+?)\s*$", re.M)
FENCES = re.compile(r"^ *```.*?^ *```$", re.S | re.M)


def pages_of(navigation: Any) -> list[str]:
    """The pages of the navigation, in order."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def anchor_of(heading: str) -> str:
    """The anchor that Python-Markdown gives to a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors_of(page: Path) -> set[str]:
    return {
        anchor_of(title)
        for title in SECTIONS.findall(FENCES.sub("", page.read_text(encoding="utf-8")))
    }


def test_the_navigation_has_every_page_once() -> None:
    """A pattern stands for pages that are not listed."""
    entries = pages_of(SITE["nav"])
    listed = [page for page in entries if "*" not in page]
    written = {page.relative_to(DOCS).as_posix() for page in PAGES}
    matched = {page for entry in entries for page in written if fnmatch(page, entry)}
    assert len(listed) == len(set(listed))
    assert set(listed) <= written | set(FROM_OUTSIDE)
    assert written | set(FROM_OUTSIDE) == matched | set(listed)
    assert [path for path in FROM_OUTSIDE.values() if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [*OUTSIDE, *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_sections(page: Path) -> None:
    text = FENCES.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors_of(found), f"{page.name}: {target}"
    for name in re.findall(r"\]\[([\w-]+)\]", text):
        assert re.search(rf"^\[{name}\]: https://", text, re.M), f"{page.name}: [{name}]"


def test_the_reference_has_every_public_name() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    documented = re.findall(r"^::: shardwise\.([\w.]+)$", text, re.M)
    expected = {
        *sw.__all__,
        *(f"data.{name}" for name in shardwise.data.__all__),
    }
    assert len(documented) == len(set(documented))
    assert set(documented) >= expected


@pytest.mark.parametrize("script", ["idea", "concepts", "results", "weight"])
def test_pictures_are_what_their_scripts_draw(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PICTURES))
    for name, lines in runpy.run_path(str(PICTURES / f"{script}.py"))["pictures"]().items():
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == "\n".join(lines) + "\n", (
            name
        )


def test_every_picture_is_shown_and_has_colours_for_the_dark() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*OUTSIDE, *PAGES])
    for picture in PICTURES.glob("*.svg"):
        assert f"images/{picture.name.replace('.narrow', '')})" in text, picture.name
        assert "prefers-color-scheme: dark" in picture.read_text(encoding="utf-8"), picture.name


@pytest.mark.long
def test_the_site_builds_and_its_pages_load_nothing_from_the_network(tmp_path: Path) -> None:
    """Also checks links, both variants of pictures, and what phones need."""
    pytest.importorskip("mkdocs", reason="this test needs the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    assert 'data-label="tests"' in (tmp_path / "supported.html").read_text(encoding="utf-8")
    assert "idea.narrow.light.svg" in (tmp_path / "index.html").read_text(encoding="utf-8")
    for page in tmp_path.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", html)
        loaded += re.findall(
            r"<link[^>]* rel=\"?(?:stylesheet|preload)[^>]* href=\"?([^\s\">]+)", html
        )
        for source in loaded:
            assert not source.startswith(("http:", "https:", "//")), f"{page}: {source}"
            folder = tmp_path if source.startswith("/") else page.parent
            name = source.partition("#")[0].partition("?")[0].lstrip("/")
            assert source.startswith("data:") or (folder / name).exists(), f"{page}: {source}"
