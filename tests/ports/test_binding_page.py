"""The package that docs/ports/binding.md shows, as a stranger would install it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shardwise as sw
from tests.docs.blocks import blocks_of, check_syntax

SOURCE = Path(sw.__file__).parents[1]
SCRIPT = """
import sys
import shardwise as sw

sw.save("early", {"step": 3})
print("rowtables" in sys.modules)
import rowtables

table, other = rowtables.RowTable(5, 2), rowtables.RowTable(5, 2)
table.local.fill_(3.0)
table.updates = 4
sw.save("c", {"table": table, "step": 3})
sw.load("c", {"table": other})
print(other.local.sum().item(), other.updates, sorted(sw.open("c")))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the package, and the metadata that an installation makes of its entry point."""
    blocks = {block.title: block for block in blocks_of("ports/binding.md")}
    for title, block in blocks.items():
        check_syntax(block)
        if title.endswith(".py"):
            (tmp_path / title).parent.mkdir(exist_ok=True)
            (tmp_path / title).write_text(block.text)
    metadata = tmp_path / "rowtables-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rowtables\nVersion: 1.0\n")
    entry = blocks["pyproject.toml"].text.splitlines()[1].replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[shardwise.bindings]\n{entry}\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True
    )


def test_the_package_binds_its_type_once_it_is_imported(package: Path) -> None:
    done = run(package, "-c", SCRIPT)
    assert done.stdout.splitlines() == [
        "False",
        "30.0 4 ['step', 'table.rows', 'table.updates']",
    ], done.stderr


KNOWN = """
import shardwise as sw
import rowtables

table = rowtables.RowTable(5, 2)
with sw.Checkpointer("run", memory=None) as checkpointer:
    for step in range(4):
        table.local.fill_(step)
        table.updates = step
        if step == 3:
            table.local = table.local.clone()
        print(checkpointer.save(step, {"table": table}).report.why_bound)
        saved = sw.open(f"run/step-{step:08d}")
        print(saved["table.rows"][...].sum().item(), saved["table.updates"])
"""


def test_a_checkpointer_knows_the_tensors_of_the_last_save(package: Path) -> None:
    done = run(package, "-c", KNOWN)
    assert done.stdout.splitlines() == [
        *("this is the first save", "0.0 0", "", "10.0 1", "", "20.0 2"),
        *("the addresses of tensors have changed", "30.0 3"),
    ], done.stderr


def test_the_package_passes_the_suite(package: Path) -> None:
    done = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_rowtables.py")
    assert done.returncode == 0, done.stdout


def test_a_package_that_cannot_be_imported_is_named(package: Path) -> None:
    (package / "rowtables" / "checkpoints.py").write_text("import nowhere\n")
    done = run(package, "-c", SCRIPT)
    assert "PluginError: the package rowtables provides shardwise.bindings" in done.stderr
    assert "No module named 'nowhere'" in done.stderr
