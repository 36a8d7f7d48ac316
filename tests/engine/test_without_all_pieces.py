"""What people do with a checkpoint of shardwise lists no more pieces than it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

WORLD = 8
WHOLE = torch.arange(16 * 12, dtype=torch.float32).reshape(16, 12)


def shards(rank: int, data: torch.Tensor) -> sw.Shards:
    """Four rows of four columns or eight, as two axes of ranks hold them."""
    box = sw.Box((4 * (rank // 2), 6 * (rank % 2)), (4, 6))
    return sw.Shards((16, 12), torch.float32, [(box, data[box.slices()].clone())])


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of eight ranks; to list all of its pieces or files is an error."""

    def save(group: ThreadGroup) -> None:
        state: dict[str, Any] = {f"w{i}": shards(group.rank, WHOLE + i) for i in range(3)}
        sw.save(tmp_path / "it", state | {"rng": sw.RngState(), "step": 3}, group=group)

    run_ranks(WORLD, save)

    def refuse(*_: object) -> None:
        raise AssertionError("all pieces are listed")

    monkeypatch.setattr(type(sw.open(tmp_path / "it").layout), "pieces", property(refuse))
    return tmp_path / "it"


def test_pieces_are_runs_of_two_axes(place: Path) -> None:
    runs = sw.open(place).layout.runs
    assert len(runs) == 3
    assert runs.count.tolist() == [[4, 2]] * 3


def test_it_loads_into_another_sharding(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("all files are listed")

    monkeypatch.setattr(type(sw.open(place).layout.files), "__iter__", refuse)

    def load(group: ThreadGroup) -> None:
        box = sw.Box((0, 4 * group.rank), (16, 4))
        parts = {f"w{i}": torch.zeros(16, 4) for i in range(3)}
        state: dict[str, Any] = {
            name: sw.Shards((16, 12), torch.float32, [(box, part)]) for name, part in parts.items()
        }
        sw.load(place, state | {"rng": sw.RngState(), "step": None}, group=group)
        for i in range(3):
            assert torch.equal(parts[f"w{i}"], WHOLE[box.slices()] + i)

    run_ranks(3, load)


def test_it_is_read_and_verified(place: Path) -> None:
    checkpoint = sw.open(place)
    assert checkpoint.verify().intact
    assert torch.equal(checkpoint["w1"][3:9, 5:7], WHOLE[3:9, 5:7] + 1)
    boxes = {rank: box for box, rank in checkpoint.boxes("w2")}
    assert boxes == {rank: shards(rank, WHOLE).fragments[0].box for rank in range(WORLD)}
    assert checkpoint.compare(sw.open(place)).same


def test_damage_is_named(place: Path) -> None:
    file = sw.open(place).layout.files[5]
    assert file.entry is not None
    data = bytearray((place / file.name).read_bytes())
    data[file.entry.data_at] ^= 1
    (place / file.name).write_bytes(data)
    with pytest.raises(sw.CorruptionError, match=r"w0, w1, w2"):
        sw.open(place).verify()


def test_commands_show_it(place: Path, tmp_path: Path) -> None:
    commands = pytest.importorskip("tests.commands", reason="commands need typer and rich")
    document = commands.run_command("inspect", "--json", place).document
    assert [each["boxes"] for each in document["tensors"]] == [8, 8, 8]
    assert [each["rank"] for each in document["files"]] == [*range(WORLD)]
    boxes = commands.run_command("inspect", "--json", place, "w1").document["boxes"]
    assert {(each["rank"], tuple(each["offset"])) for each in boxes} == {
        (rank, (4 * (rank // 2), 6 * (rank % 2))) for rank in range(WORLD)
    }
    sw.export(place, tmp_path / "new", to="hf", model_key="")
