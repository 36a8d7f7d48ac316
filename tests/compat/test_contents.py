"""Golden files hold stored state, and no results that another machine would compute otherwise."""

from __future__ import annotations

import re
import tarfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.compat.foreign.contents import COMPUTED, CONTENTS, HELD, SAVED
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
TOLERANT = {"formats/test_megatron_legacy.py", "formats/programs/train_megatron.py"}


@pytest.mark.parametrize("archive", sorted(path.name for path in GOLDEN.glob("*.tar.*")))
def test_every_file_is_stated_to_be_stored_state(archive: str) -> None:
    patterns = CONTENTS[archive.removesuffix(".tar.xz")]
    with tarfile.open(GOLDEN / archive) as opened:
        names = [each.name.removeprefix("./") for each in opened if not each.isdir()]
    assert {*patterns.values()} <= {SAVED, HELD, COMPUTED}
    kinds = {name: {k for p, k in patterns.items() if fnmatchcase(name, p)} for name in names}
    assert {name for name, kind in kinds.items() if len(kind) != 1} == set()
    assert {p for p in patterns if not any(fnmatchcase(name, p) for name in names)} == set()


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
    computed = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if "logits.pt" in path.read_text(encoding="utf-8")
    }
    assert computed - LOADERS - {"formats/conftest.py"} <= TOLERANT
