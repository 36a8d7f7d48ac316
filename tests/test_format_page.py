"""docs/format.md is enough to write a reader: the one on the page, held against the library."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32),
    *(torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
PAGE = Path(__file__).parent.parent / "docs" / "format.md"


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    """The functions of the page's reader, which uses json, zlib and numpy."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[-1]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 50
    assert set(re.findall(r"^(?:import|from) (\w+)", code, re.M)) == {"json", "zlib", "numpy"}
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def save(group: ThreadGroup, path: Path) -> None:
    """Every dtype sharded by rows, a large tensor of many blocks, a tie, values of both kinds."""
    rows = sw.Box((2 * group.rank, 0), (2, 3))
    state: dict[str, object] = {}
    for dtype in DTYPES:
        raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8).reshape(2, 3 * dtype.itemsize)
        local = (raw + group.rank).view(dtype)
        state[str(dtype)] = sw.Shards((8, 3), local.dtype, [(rows, local)])
    generator = torch.Generator().manual_seed(group.rank)
    part = torch.randn(100, 1000, generator=generator)
    box = sw.Box((100 * group.rank, 0), (100, 1000))
    large = sw.Shards((400, 1000), torch.float32, [(box, part)])
    tied = torch.arange(5.0)
    state |= {"large": large, "empty": torch.zeros(0, 3), "scalar": torch.tensor(7)}
    state |= {"a": tied, "b": tied, "epoch": 3, "mine": sw.PerRank((group.rank, 4))}
    sw.save(path, state, group=group)


def test_the_reader_of_the_page_reads_what_the_library_wrote(
    reader: dict[str, Any], tmp_path: Path
) -> None:
    run_ranks(4, lambda group: save(group, tmp_path))
    manifest = reader["read_manifest"](tmp_path)
    checkpoint = sw.open(tmp_path)
    assert {entry["name"] for entry in manifest["tensors"]} == set(checkpoint.tensors())
    assert any("repeat" in p for t in manifest["tensors"] for p in t.get("pieces", []))
    assert any("same_as" in t for t in manifest["tensors"])
    for name, tensor in checkpoint.tensors().items():
        values = tensor[...]
        expected = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
        assert reader["read_tensor"](tmp_path, manifest, name).tobytes() == expected, name
    assert {o["name"]: o["value"] for o in manifest["objects"]}["epoch"] == 3


def test_it_reads_what_each_rank_has_of_its_own(reader: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(4, lambda group: save(group, tmp_path))
    manifest = reader["read_manifest"](tmp_path)
    assert manifest["per_rank"] == ["mine"]
    for file in manifest["files"]:
        data = reader["read_bytes"](tmp_path, file, file["objects_at"], file["checksums_at"])
        assert json.loads(data) == {"mine": {"$": "tuple", "v": [file["rank"], 4]}}


def test_the_example_is_a_manifest(tmp_path: Path) -> None:
    """Without the content of the files."""
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    document = json.loads(example)
    del document["crc32"]
    body = json.dumps(document, indent=1).rstrip("\n}").encode() + b",\n"
    (tmp_path / "manifest.json").write_bytes(body + b'"crc32":%d}\n' % zlib.crc32(body))
    opened = sw.open(tmp_path)
    shapes = {name: tensor.shape for name, tensor in opened.tensors().items()}
    assert shapes == {each["name"]: tuple(each["shape"]) for each in document["tensors"]}
    assert opened.layout.pieces.offset.tolist() == [[0, 0], [16, 0], [32, 0], [48, 0]]


@pytest.mark.parametrize("position", [0.1, 0.5, 0.9, 0.9999])
def test_it_notices_a_flipped_bit_wherever_it_is(
    reader: dict[str, Any], tmp_path: Path, position: float
) -> None:
    sw.save(tmp_path, {"w": torch.randn(300, 1000)})
    victim = next(tmp_path.glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[int(position * len(content))] ^= 4
    victim.write_bytes(content)
    with pytest.raises(AssertionError):
        reader["read_tensor"](tmp_path, reader["read_manifest"](tmp_path), "w")
