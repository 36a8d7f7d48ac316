"""docs/cli.md describes what the commands print with --json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from tests.cli.conftest import Run
from tests.tools.telemetry_runs import save_of, write_run

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
FREE = {"metrics", "seconds", "value", "values", "a", "b", "left_out"}
"""Keys whose values have other keys each time."""


def described() -> dict[str, list[Any]]:
    """The documents on the page, by command."""
    found = {}
    for section in PAGE.read_text().split("\n### ")[1:]:
        blocks = re.findall(r"```json\n(.*?)```", section, re.S)
        found[section.split("\n")[0]] = [json.loads(block) for block in blocks]
    return found


def shape(value: Any) -> Any:
    """The keys of a document, all the way down; of a list, those of its first item."""
    if isinstance(value, dict):
        return {key: None if key in FREE else shape(each) for key, each in value.items()}
    return [shape(value[0])] if isinstance(value, list) and value else None


def test_the_page_has_the_keys_that_are_printed(run: Run, root: Path, tmp_path: Path) -> None:
    one, two = root / "step-00000100", tmp_path / "two"
    state = {"model": {"w": torch.ones(3, 2)}, "epoch": 4, "mine": sw.PerRank({"seed": 1})}
    sw.save(two, state, step=1)
    sw.save(tmp_path / "three", {**state, "model": {"w": torch.zeros(3, 2)}, "epoch": 5})
    data = next(one.glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (root / "step-00000400").mkdir()
    slow = tmp_path / "slow"
    at_once = save_of(16, step=1, noise=0, started="2026-11-26")
    write_run(slow, [at_once, save_of(16, step=2, noise=0, slow={"write": {3: 3.0}})])
    commands: dict[str, list[tuple[str | Path, ...]]] = {
        "ls": [(root,)],
        "inspect": [(two,), (two, "model.w"), (two, "epoch"), (two, "mine")],
        "verify": [(root,)],
        "diff": [(two, tmp_path / "three")],
        "export": [(two, tmp_path / "published")],
        "report": [(slow, "-o", tmp_path / "report.html")],
        "rm": [(root, "--step", "200", "--yes")],
    }
    page = described()
    assert page.keys() == commands.keys()
    for command, calls in commands.items():
        for document, args in zip(page[command], calls, strict=True):
            printed = run(command, *args, "--json").document
            assert shape(printed).keys() == shape(document).keys(), command
            for key, value in shape(document).items():
                if value is not None:
                    assert shape(printed)[key] == value, (command, key)
