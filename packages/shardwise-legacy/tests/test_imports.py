"""The package uses of shardwise what every package may use: the port of readers, public names."""

from __future__ import annotations

import ast
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import shardwise
from shardwise.parts.formats import reader

PACKAGE = Path(__file__).parents[1]
SOURCES = sorted((PACKAGE / "src").rglob("*.py"))
PORT = {
    "shardwise.parts.formats.reader": {*reader.__all__},
    "shardwise.parts.formats.specification": {"add_by_specification"},
    "shardwise": {*shardwise.__all__},
}
"""The modules that a reader may import names from, and these names."""


def wrong_imports(text: str) -> list[str]:
    """What a module imports of shardwise beside the port; and names behind public modules."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [each.name for each in node.names if each.name.split(".")[0] == "shardwise"]
            found += [name for name in named if name != "shardwise"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise":
            allowed = PORT.get(node.module or "", set())
            found += [f"{node.module}.{a.name}" for a in node.names if a.name not in allowed]
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_inner = re.match("_[^_]", node.attr) and owner != "self"
            if is_inner or (owner in ("sw", "shardwise") and node.attr not in shardwise.__all__):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id in ("import_module", "__import__"):
            found.append(node.id)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_it_imports_the_port_and_public_names_only(path: Path) -> None:
    assert wrong_imports(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("import shardwise as sw\nsw.spec('a -> b')", False),
        ("from shardwise.parts.formats.reader import Builder", False),
        ("from shardwise.parts.formats.specification import add_by_specification", False),
        ("from shardwise.parts.formats.reader import Path", True),
        ("from shardwise.parts.formats.masters import part_of_run", True),
        ("from shardwise.parts.formats import reader", True),
        ("import shardwise.kernel.store", True),
        ("import shardwise as sw\nsw.opening.agree_to_open", True),
        ("def read(tree, builder):\n    builder._tensors", True),
        ("from importlib import import_module\nimport_module('shardwise.kernel.store')", True),
    ],
)
def test_a_wrong_import_is_seen(text: str, is_wrong: bool) -> None:
    assert bool(wrong_imports(text)) == is_wrong


def test_its_entry_points_are_installed() -> None:
    declared = PACKAGE.joinpath("pyproject.toml").read_text(encoding="utf-8")
    for key in ("megatron-legacy", "torchsnapshot"):
        (point,) = {each.value for each in entry_points(group="shardwise.readers", name=key)}
        assert f'{key} = "{point}"' in declared


def test_both_packages_have_one_version() -> None:
    """They are released together: the package needs the port as it is now."""
    declared = PACKAGE.joinpath("pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{shardwise.__version__}"' in declared
    assert f'"shardwise=={shardwise.__version__}"' in declared


def test_with_the_package_it_is_not_suggested(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(shardwise.CheckpointNotFoundError, match="legacy Megatron-LM") as caught:
        shardwise.open(tmp_path)
    assert "pip install" not in str(caught.value)
