"""Published models, of one file or several, as safetensors and as pickles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.kernel.errors import FormatError
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened
from tests.formats.reference import read_tensors

safetensors = pytest.importorskip("safetensors.torch")


def make_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(7, 4),
        "layers.0.weight": torch.randn(4, 4, dtype=torch.bfloat16),
        "layers.0.bias": torch.randn(4, dtype=torch.float16),
        "layers.0.scale": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "flags": torch.tensor([True, False]),
        "fp8": torch.randn(3, 3).to(torch.float8_e4m3fn),
    }


def write(folder: Path, name: str, weights: dict[str, torch.Tensor]) -> None:
    if name.endswith(".bin"):
        torch.save(weights, folder / name)
    else:
        safetensors.save_file(weights, folder / name, metadata={"format": "pt"})


def write_sharded(folder: Path, weights: dict[str, torch.Tensor], suffix: str) -> dict[str, str]:
    """In three files, and an index as transformers writes it."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = [f"{stem}-{i + 1:05}-of-00003{suffix}" for i in range(3)]
    index = {name: names[i % 3] for i, name in enumerate(weights)}
    for file in names:
        write(folder, file, {name: weights[name] for name in weights if index[name] == file})
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
    (folder / f"{stem}{suffix}.index.json").write_text(text)
    return index


def assert_is(place: Path, weights: dict[str, torch.Tensor]) -> None:
    expected = {f"model.{name}": each for name, each in weights.items()}
    foreign = opened(place)
    assert (foreign.format, foreign.left_out) == ("Hugging Face", ())
    read = read_tensors(place, foreign)
    assert_same({name: read[name] for name in expected}, expected)
    target = {"model": {name: torch.zeros_like(each) for name, each in weights.items()}}
    sw.load(place, target)
    assert_same(target["model"], weights)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "a.safetensors"])
def test_one_file(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, make_weights())
    if name != "a.safetensors":
        (tmp_path / "config.json").write_text("{}")
        assert_is(tmp_path, make_weights())
    if not name.endswith(".bin"):
        assert_is(tmp_path / name, make_weights())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_several_files_and_an_index(suffix: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, make_weights(), suffix)
    assert_is(tmp_path, make_weights())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_one_file_counts_before_several_as_in_transformers(suffix: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, make_weights(), suffix)
    newer = {name: torch.zeros_like(each) for name, each in make_weights().items()}
    write(tmp_path, "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin", newer)
    assert_is(tmp_path, newer)


def test_files_may_be_links_as_in_caches(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", "0a1b", make_weights())
    (tmp_path / "snapshot" / "model.safetensors").symlink_to("../blobs/0a1b")
    assert_is(tmp_path / "snapshot", make_weights())


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_tied_weights_are_both_there(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    if name.endswith(".bin"):
        torch.save(model.state_dict(), tmp_path / name)
    else:
        safetensors.save_model(model, str(tmp_path / name))
    foreign = opened(tmp_path)
    assert sum(entry.same_as is not None for entry in foreign.tensors) == 1
    fresh = Tied()
    sw.load(tmp_path, {"model": fresh})
    assert_same(fresh.state_dict(), model.state_dict())
    apart = {"model": {key: torch.zeros(5, 4) for key in ("embed.weight", "head.weight")}}
    sw.load(tmp_path, apart)
    assert_same(apart["model"], dict(model.state_dict()))


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    weights = make_weights()
    index = write_sharded(tmp_path, weights, ".safetensors")
    text = json.dumps({"weight_map": {k: v for k, v in index.items() if k != "flags"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    foreign = opened(tmp_path)
    assert [line.split(" in ")[0] for line in foreign.left_out] == ["flags"]
    torch.save({**weights, "step": 3}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors.index.json").unlink()
    foreign = opened(tmp_path)
    assert foreign.left_out == ("step in pytorch_model.bin: not a tensor",)


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"embed.weight": "model-00002-of-00003.safetensors"}, "lack 1 tensor of the index"),
        ({"embed.weight": "missing.safetensors"}, "1 is missing: missing.safetensors"),
        ({"embed.weight": "../outside.safetensors"}, "1 is missing: ../outside.safetensors"),
        ({"embed.weight": "/etc/passwd"}, "not a file of weights"),
        ({"embed.weight": 3}, "not an index of weights"),
        ([], "not an index of weights"),
    ],
)
def test_an_index_that_lies_is_refused(weight_map: object, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path, "outside.safetensors", make_weights())
    write_sharded(folder, make_weights(), ".safetensors")
    text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(FormatError, match=says):
        sw.open(folder)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_a_directory_that_was_copied_in_part_says_what_is_missing(
    suffix: str, tmp_path: Path
) -> None:
    """None of its shards is offered as a model."""
    index = write_sharded(tmp_path, make_weights(), suffix)
    names = sorted(set(index.values()))
    main = next(path.name for path in tmp_path.glob("*.index.json"))
    for name in names[1:]:
        (tmp_path / name).unlink()
    with pytest.raises(FormatError, match=rf"{main} names, 2 are missing: {', '.join(names[1:])}"):
        sw.open(tmp_path)
    (tmp_path / main).rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match=rf"3 are missing: {main}, {', '.join(names[1:])}\. Copy"):
        sw.open(tmp_path)
    (tmp_path / "elsewhere").rename(tmp_path / main)
    with pytest.raises(sw.CheckpointNotFoundError, match=f"only an index: open {tmp_path}"):
        sw.open(tmp_path / main)


def test_a_shard_that_is_opened_itself_says_that_it_is_one(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, make_weights(), ".safetensors")
    found = sw.open(tmp_path / index["embed.weight"])
    assert any(line.endswith(f"is one of 3 files: open {tmp_path}") for line in found.left_out)
