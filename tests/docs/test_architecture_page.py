"""The example of docs/architecture.md is what ranks save, and its reading list takes an evening."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardwise as sw
from tests.commands import run_command
from tests.conftest import PRELOAD
from tests.docs.blocks import DOCS, ROOT, blocks_of
from tests.tools.gang import Gang

PAGE = "architecture.md"
TEXT = (DOCS / PAGE).read_text(encoding="utf-8")
MOST_LINES_OF_AN_EVENING = 5000


def save_as_written(code: str, folder: str) -> tuple[list[int], list[int]]:
    """Run the code of the page on a rank; return the coordinates and rows of the rank."""
    names: dict[str, Any] = {"sw": sw, "torch": torch, "init_device_mesh": init_device_mesh}
    names |= {"Replicate": Replicate, "Shard": Shard, "distribute_tensor": distribute_tensor}
    exec(code.replace('"example"', repr(folder)), names)
    weight: DTensor = names["weight"]
    return [*(weight.device_mesh.get_coordinate() or [])], [int(v) for v in weight.to_local()[:, 0]]


@pytest.mark.ranks
def test_the_example_is_what_six_ranks_save(tmp_path: Path) -> None:
    code, page_manifest, listed = (
        block.text for block in blocks_of(PAGE) if block.language in ("py", "json", "text")
    )
    place = tmp_path / "example"
    with Gang(6, preload=PRELOAD) as six:
        held = six.run(save_as_written, code, str(place), timeout=100)

    # The tensor: rank 4 has dp=1, tp=1, and the box [2:4,0:4]. Ranks 0 and 3 have the same rows.
    assert held[4] == ([1, 1], [8, 12])
    assert [rank for rank, (_, rows) in enumerate(held) if rows == held[0][1]] == [0, 3]

    # The pieces: what a user sees of them.
    shown = run_command("inspect", str(place), "weight").out
    lines = [line.rstrip() for line in re.sub(r"-[0-9a-f]{16}\.", "-….", shown).splitlines()]
    assert lines[-len(listed.splitlines()) :] == listed.splitlines()
    boxes = [str(box) for box, _ in sw.open(place).boxes("bias")]
    assert boxes == ["[0:2]", "[2:4]", "[4:6]"]  # ranks 3, 4 and 5 write them

    # The files: rank 1 has the rows 2 and 3 from byte 4096 on.
    manifest = json.loads((place / "manifest.json").read_text(encoding="utf-8"))
    files = sorted(place.glob("*.safetensors"))
    data = files[1].read_bytes()
    assert len(data) == 4132
    assert torch.frombuffer(bytearray(data[4096:4128]), dtype=torch.float32).tolist() == [
        *range(8, 16)
    ]
    assert [file.stat().st_size for file in files] == [4132] * 3 + [4108] * 3

    # The manifest.
    for rule in manifest["files"]:
        del rule["checksums_crc32"]
    fields = {name: manifest[name] for name in ("files", "tensors")}
    assert json.loads(page_manifest) == fields


def test_a_load_reads_the_column_from_three_files() -> None:
    """The page says which pieces a column overlaps; each is one of the three boxes."""
    column = sw.Box((0, 1), (6, 1))
    boxes = [sw.Box((2 * part, 0), (2, 4)) for part in range(3)]
    assert all(column.intersect(box) for box in boxes)
    assert "the box `[0:6,1:2]` overlaps all three pieces" in TEXT
    assert str(column) == "[0:6,1:2]"


def test_the_picture_has_the_entry_of_the_page() -> None:
    drawing = (DOCS / "images" / "weight.svg").read_text(encoding="utf-8").replace("&quot;", '"')
    texts = re.findall(r">([^<>]+)</text>", drawing)
    (manifest,) = (block.text for block in blocks_of(PAGE) if block.language == "json")
    entry = "".join(text for text in texts if text.startswith(('{"name"', '"offset"')))
    assert entry in manifest
    for text in ("[2:4,0:4], rank 1 writes", "ranks 1, 4", "4096", "4128"):
        assert text in texts


def test_the_kernel_is_read_in_an_evening() -> None:
    """The numbered list, without what is named as depth below it."""
    section = TEXT.partition("## In which order is the kernel read?")[2].partition("\n## ")[0]
    numbered = "".join(line for line in section.splitlines() if re.match(r"\d+\. ", line))
    files = re.findall(r"`([\w/]+\.py)`", numbered)
    assert len(files) >= 12
    lines = {
        file: len((ROOT / "src" / "shardwise" / file).read_text(encoding="utf-8").splitlines())
        for file in files
    }
    assert sum(lines.values()) <= MOST_LINES_OF_AN_EVENING, lines
    assert f"at most {MOST_LINES_OF_AN_EVENING:,} lines" in section
