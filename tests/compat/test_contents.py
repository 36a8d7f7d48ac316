"""Golden files hold stored state, and no results that another machine would compute otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.compat.foreign.contents import CONTENTS, HELD, SAVED, unstated_files
from tests.formats.foreign_goldens import GOLDEN

TESTS = Path(__file__).parents[1]
# The modules that may name golden files or their directories.
LOADERS = {
    "compat/foreign/contents.py",
    "compat/golden.py",
    "compat/test_contents.py",
    "compat/test_golden.py",
    "formats/foreign_goldens.py",
}
NAMES = re.compile(r'"compat"|\.tar\.xz"|"[^"\n]*compat/(v1|foreign)')


@pytest.mark.parametrize("archive", sorted(path.name for path in GOLDEN.glob("*.tar.*")))
def test_every_file_is_stated_to_be_stored_state(archive: str) -> None:
    patterns = CONTENTS[archive.removesuffix(".tar.xz")]
    assert {*patterns.values()} <= {SAVED, HELD}
    assert unstated_files(GOLDEN / archive, patterns) == set()


def test_there_are_no_other_golden_files() -> None:
    """Programs and archives of other frameworks, and the checkpoints of each version."""
    allowed = {f"foreign/{name}.tar.xz" for name in CONTENTS}
    for folder in ("v1", "v1_lbfgs", "v2"):
        allowed |= {f"{folder}/{path.name}" for path in (TESTS / "compat" / folder).iterdir()}
    data = {
        path.relative_to(TESTS / "compat").as_posix()
        for path in (TESTS / "compat").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data == allowed
    suffixes = (".py", ".pyc", ".sh")
    rest = [p for p in TESTS.rglob("*") if p.is_file() and p.suffix not in suffixes]
    assert [path for path in rest if not path.is_relative_to(TESTS / "compat")] == []


def test_golden_files_are_read_through_the_loaders_alone() -> None:
    named = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if NAMES.search(path.read_text(encoding="utf-8"))
    }
    assert named <= LOADERS
