"""Models with torchao's names in safetensors: read as composites, and written for torchao."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip(
    "torchao.quantization", reason="of torchao 0.18 and torch 2.10", exc_type=ImportError
)
from torchao.prototype.safetensors.safetensors_support import (
    flatten_tensor_state_dict,
    unflatten_tensor_state_dict,
)
from torchao.prototype.safetensors.safetensors_utils import is_metadata_torchao

import shardwise as sw
from tests.tensor_classes.tensors import MAKERS, TRAINING, Holder, bits, values
from tests.tensor_classes.test_torch_files import float8_with_activations

KINDS = {
    **{kind: make for kind, make in MAKERS.items() if kind not in TRAINING},
    "float8, activations": float8_with_activations,
}


def model_of(kind: str, seed: int) -> nn.Module:
    model = nn.Module()
    model.layer = Holder(KINDS[kind](values(seed)))
    model.norm = Holder(values(seed)[0])
    return model


def by_torchao(place: Path) -> dict[str, Any]:
    """Return the tensors of the files in a directory, as transformers with torchao loads them."""
    metadata: dict[str, str] = {}
    arrays: dict[str, torch.Tensor] = {}
    for path in sorted(place.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            metadata |= file.metadata()
        arrays |= load_file(path)
    metadata.pop("format", None)
    assert is_metadata_torchao(metadata)
    tensors, rest = unflatten_tensor_state_dict(arrays, metadata)
    assert not rest
    return tensors


def save_by_torchao(model: nn.Module, path: Path) -> None:
    state = {name: tensor.data for name, tensor in model.state_dict().items()}
    arrays, metadata = flatten_tensor_state_dict(state)
    save_file(arrays, path, metadata)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_torchao_loads_into_a_live_model(tmp_path: Path, kind: str) -> None:
    saved, live = model_of(kind, 0), model_of(kind, 1)
    save_by_torchao(saved, tmp_path / "model.safetensors")
    assert not sw.open(str(tmp_path)).left_out
    sw.load(str(tmp_path), {"model": live})
    assert bits(live.layer.weight) == bits(saved.layer.weight)
    assert bits(live.norm.weight) == bits(saved.norm.weight)


@pytest.mark.parametrize("files", ["one file", "several files"])
@pytest.mark.parametrize("kind", KINDS)
def test_torchao_loads_an_export(tmp_path: Path, kind: str, files: str) -> None:
    saved = model_of(kind, 0)
    sw.save(str(tmp_path / "own"), {"model": saved, "step": 3})
    size = 2**30 if files == "one file" else 2**13
    report = sw.export(str(tmp_path / "own"), str(tmp_path / "hf"), to="hf", max_file=size)
    assert len(report.left_out) == 1, "step"
    assert (len([*(tmp_path / "hf").glob("*.safetensors")]) > 1) == (files == "several files")
    found = by_torchao(tmp_path / "hf")
    assert {*found} == {"layer.weight", "norm.weight"}
    assert type(found["layer.weight"]) is type(saved.layer.weight.data)
    assert bits(found["layer.weight"]) == bits(saved.layer.weight)
    assert bits(found["norm.weight"]) == bits(saved.norm.weight)
    live = model_of(kind, 1)
    sw.load(str(tmp_path / "hf"), {"model": live})
    assert bits(live.layer.weight) == bits(saved.layer.weight)


def test_a_file_of_torch_save_becomes_one_of_torchao(tmp_path: Path) -> None:
    saved = model_of("int8, activations", 0)
    torch.save({"model": saved.state_dict()}, tmp_path / "file.pt")
    sw.export(str(tmp_path / "file.pt"), str(tmp_path / "hf"), to="hf")
    assert bits(by_torchao(tmp_path / "hf")["layer.weight"]) == bits(saved.layer.weight)


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model = model_of("int8", 0)
    model.head = Holder(values(1))
    model.head.weight = model.layer.weight
    sw.save(str(tmp_path / "own"), {"model": model})
    sw.export(str(tmp_path / "own"), str(tmp_path / "hf"), to="hf")
    found = by_torchao(tmp_path / "hf")
    assert bits(found["layer.weight"]) == bits(model.layer.weight)
    assert {*found} == {"layer.weight", "norm.weight"}


def test_exports_that_would_change_or_lose_a_part_are_refused(tmp_path: Path) -> None:
    sw.save(str(tmp_path / "own"), {"model": model_of("int8", 0)})
    source, target = str(tmp_path / "own"), str(tmp_path / "hf")
    with pytest.raises(sw.StateError, match=r"Int8Tensor model\.layer\.weight, and"):
        sw.export(source, target, to="hf", dtype="bfloat16")
    with pytest.raises(sw.StateError, match=r"model\.layer\.weight: its inner tensor scale"):
        sw.export(source, target, to="hf", skip=["*.scale"])
    assert not Path(target).exists()


def altered(path: Path, **changes: Any) -> None:
    """Change the metadata of a file. None removes a key."""
    with safe_open(path, framework="pt") as file:
        metadata = {**file.metadata(), **changes}
    save_file(load_file(path), path, {k: v for k, v in metadata.items() if v is not None})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer.weight": None}, r"layer\.weight: the metadata does not describe"),
        ({"layer.weight": "[]"}, r"layer\.weight: the metadata does not describe"),
        ({"tensor_names": "7"}, r"tensor_names is not a list"),
        ({"tensor_names": '["layer.weight", "a.b"]'}, r"a\.b: the metadata does not describe"),
        (
            {
                "layer.weight": json.dumps(
                    {"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}
                )
            },
            r"layer\.weight: the metadata does not describe a Int8Tensor",
        ),
        (
            {
                "layer.weight": json.dumps(
                    {
                        "_type": "Int8Tensor",
                        "_data": {"dtype": {"_type": "torch.dtype", "_data": "save"}},
                        "_tensor_data_names": ["qdata", "scale"],
                    }
                )
            },
            r"layer\.weight: the metadata does not describe",
        ),
        (
            {
                "layer.weight": json.dumps(
                    {
                        "_type": "Int8Tensor",
                        "_data": {},
                        "_tensor_data_names": ["qdata", "scale", "more"],
                    }
                )
            },
            r"layer\.weight: the inner tensor layer\._weight_more is missing",
        ),
        (
            {
                "layer.weight": json.dumps(
                    {
                        "_type": "Int8Tensor",
                        "_data": {"dtype": {"_type": "Popen", "_data": {}}},
                        "_tensor_data_names": ["qdata", "scale"],
                    }
                )
            },
            r"layer\.weight: the metadata does not describe.*Popen",
        ),
    ],
)
def test_bad_metadata_is_named(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    save_by_torchao(model_of("int8", 0), tmp_path / "model.safetensors")
    altered(tmp_path / "model.safetensors", **changes)
    with pytest.raises(sw.FormatError, match=expected):
        sw.open(str(tmp_path))


def test_an_unknown_class_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    saved = model_of("int8", 0)
    save_by_torchao(saved, tmp_path / "model.safetensors")
    entry = {"_type": "NewTensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}
    altered(tmp_path / "model.safetensors", **{"layer.weight": json.dumps(entry)})
    live = {"model": model_of("int8", 1)}
    before = bits(live["model"].norm.weight)
    with pytest.raises(sw.FormatError, match=r"layer\.weight \(NewTensor\).*skip_unknown=True"):
        sw.load(str(tmp_path), live)
    assert bits(live["model"].norm.weight) == before
    found = sw.open(str(tmp_path), skip_unknown=True)
    assert "model.norm.weight" in found
    assert "model.layer.weight" not in found
    assert "NewTensor" in str(found.left_out)
