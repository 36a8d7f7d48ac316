"""The wheel, as `make dist` builds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
SOURCE = PACKAGE / "src"
NOT_SOURCES = ("tests", "build", "*.egg-info", "__pycache__")


@pytest.mark.long
def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    """Also `py.typed` and the specification, which are no modules."""
    pytest.importorskip("build", reason="pip install '.[dev]'")
    shutil.copytree(PACKAGE, tmp_path / "source", ignore=shutil.ignore_patterns(*NOT_SOURCES))
    # Without isolation, because tests need no network.
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path)]
    subprocess.run([sys.executable, *command, str(tmp_path / "source")], check=True, timeout=300)
    needed = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info/" not in str(path)
    }
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "torchsnapshot = shardwise_legacy.torchsnapshot:READER" in (
            archive.read(entries).decode()
        )
    assert {name for name in names if ".dist-info/" not in name} == needed
    assert "shardwise_legacy/megatron/megatron.spec" in needed
