"""`shardwise inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.cli.conftest import Run


@pytest.fixture
def step(root: Path) -> Path:
    return root / "step-00000300"


def test_the_document_holds_all_that_was_saved(run: Run, step: Path) -> None:
    document = run("inspect", step, "--json").document
    saved = sw.open(step)
    assert list(document) == [
        *("path", "step", "saved_at", "save_id", "world_size", "bytes", "metrics", "files"),
        *("tensors", "values", "per_rank"),
    ]
    assert (document["path"], document["step"], document["world_size"]) == (str(step), 300, 1)
    (file,) = document["files"]
    assert file["bytes"] == document["bytes"] == (step / file["name"]).stat().st_size
    tensors = {each["name"]: each for each in document["tensors"]}
    assert {
        name: (getattr(torch, each["dtype"]), torch.Size(each["shape"]))
        for name, each in tensors.items()
    } == {name: (each.dtype, each.shape) for name, each in saved.tensors().items()}
    assert tensors["model.layers.0.proj.weight"] == {
        "name": "model.layers.0.proj.weight",
        "dtype": "float32",
        "shape": [8, 8],
        "bytes": 256,
        "boxes": 1,
        "same_as": None,
    }
    assert tensors["model.head.weight"]["same_as"] == "model.embed.weight"
    values = {each["name"]: each["value"] for each in document["values"]}
    assert values["sched.lr"] == 0.5
    assert document["per_rank"] == ["rng"]


def test_layers_that_are_alike_are_shown_once(run: Run, step: Path) -> None:
    collapsed = run("inspect", step).out
    assert "layers.0…3" in collapsed
    assert collapsed.count("proj") == 1
    everything = run("inspect", step, "--all").out
    assert "…" not in everything
    assert everything.count("proj") == 4


def test_the_header_and_values_are_shown(run: Run, step: Path) -> None:
    lines = [line.split(None, 1) for line in run("inspect", step).out.splitlines() if line]
    facts = {label: rest for label, rest, *_ in lines[:7]}
    assert facts["checkpoint"] == str(step)
    assert facts["step"] == "300"
    assert facts["ranks"] == "1"
    assert facts["metrics"] == "loss=0.003333"
    out = run("inspect", step).out
    assert "(0.9, 0.95)" in out
    assert "'cosine'" in out
    assert "tied to model.embed.weight" in out


def test_a_name_of_several_shows_what_is_below(run: Run, step: Path) -> None:
    document = run("inspect", step, "model.layers.1", "--json").document
    assert [each["name"] for each in document["tensors"]] == [
        f"model.layers.1.{name}"
        for name in ("proj.weight", "proj.bias", "norm.weight", "norm.bias")
    ]
    assert document["values"] == document["per_rank"] == []
    assert "embed" not in run("inspect", step, "model.layers").out


def test_the_boxes_of_a_tensor_and_their_ranks_are_told(run: Run, sharded: Path) -> None:
    document = run("inspect", sharded, "grid", "--json").document
    assert {key: document[key] for key in ("name", "dtype", "shape", "bytes", "same_as")} == {
        "name": "grid",
        "dtype": "float32",
        "shape": [6, 8],
        "bytes": 192,
        "same_as": None,
    }
    boxes = document["boxes"]
    expected = sorted(sw.open(sharded).boxes("grid"))
    assert [
        (sw.Box(tuple(each["offset"]), tuple(each["shape"])), each["rank"]) for each in boxes
    ] == expected
    assert expected[3] == (sw.Box((3, 4), (3, 4)), 3)
    for each in boxes:
        assert each["file"].startswith(f"r{each['rank']:05d}-")
        assert each["bytes"] == 48


def test_very_many_boxes_are_listed_in_part(run: Run, sharded: Path) -> None:
    lines = run("inspect", sharded, "grid").out.splitlines()
    assert any(line.split()[:3] == ["3", "[3:6,", "4:8]"] for line in lines)
    assert "368 more: --all lists them" in run("inspect", sharded, "many").out
    assert run("inspect", sharded, "many", "--all").out.count(".safetensors") == 400


def test_one_box_is_listed(run: Run, step: Path) -> None:
    assert "[0:32, 0:8]" in run("inspect", step, "model.embed.weight").out


def test_a_scalar_and_an_empty_tensor_are_shown(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path, {"scalar": torch.tensor(1.0), "empty": torch.empty(0, 3)})
    assert "[]" in run("inspect", tmp_path, "scalar").out
    assert run("inspect", tmp_path, "empty", "--json").document["boxes"] == []
    assert "0 boxes" in run("inspect", tmp_path, "empty").out


def test_a_tied_tensor_has_the_boxes_of_the_other(run: Run, step: Path) -> None:
    document = run("inspect", step, "model.head.weight", "--json").document
    other = run("inspect", step, "model.embed.weight", "--json").document
    assert document["same_as"] == other["name"]
    assert document["boxes"] == other["boxes"] != []


def test_values_are_shown_in_full(run: Run, step: Path, sharded: Path) -> None:
    assert run("inspect", step, "sched.lr", "--json").document == {
        "path": str(step),
        "name": "sched.lr",
        "value": 0.5,
    }
    assert run("inspect", step, "sched.name").out.endswith('"cosine"\n')
    assert run("inspect", sharded, "seed", "--json").document == {
        "path": str(sharded),
        "name": "seed",
        "values": [0, 1, 2, 3],
    }
    table = [line.split() for line in run("inspect", sharded, "seed").out.splitlines()]
    assert ["3", "3"] in table


def test_damaged_values_of_a_rank_are_not_shown(run: Run, step: Path) -> None:
    path = next(step.glob("*.safetensors"))
    at = sw.open(step).layout.files[0].entry.objects_at
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    ran = run("inspect", step, "rng")
    assert "differ from those that were saved" in ran.err
    assert (ran.out, ran.status) == ("", 1)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model.layers.0.proj.weigh", "model.layers.0.proj.weight"),
        ("modle", "model"),
        ("norm.bias", "model.layers.0.norm.bias"),
    ],
)
def test_a_name_that_is_not_there_has_a_hint(run: Run, step: Path, name: str, meant: str) -> None:
    ran = run("inspect", step, name)
    assert f"has no name {name!r}, and no names that begin with it: did you mean {meant}" in ran.err
    assert (ran.out, ran.status) == ("", 2)


def test_a_manifest_that_cannot_be_trusted_is_refused(run: Run, step: Path) -> None:
    manifest = step / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"float32"', b'"float7"', 1))
    ran = run("inspect", step)
    assert "the manifest was altered" in ran.err
    assert str(step) in ran.err
    assert (ran.out, ran.status) == ("", 1)


def test_names_do_not_reach_the_terminal_raw(run: Run, tmp_path: Path) -> None:
    sw.save(tmp_path, {"a\x1b[31m": torch.ones(1), "b": "\x1b[0m"})
    out = run("inspect", tmp_path).out
    assert "\x1b" not in out
    assert "a\\x1b[31m" in out


def test_a_checkpoint_of_the_trained_part_says_so(run: Run, tmp_path: Path) -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model = torch.nn.Sequential(frozen, torch.nn.Linear(2, 2))
    sw.save(tmp_path, {"model": sw.trainable(model)})
    shown = run("inspect", tmp_path).out
    assert "only the trained part of model, without 2 frozen tensors" in shown
    document = run("inspect", tmp_path, "--json").document
    assert document["frozen"] == {"model": ["0.weight", "0.bias"]}
