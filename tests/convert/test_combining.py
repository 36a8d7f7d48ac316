"""Checkpoints made of others: averages, merged adapters; byte for byte, in bounded memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise.convert import write
from shardwise.state.leaves import same_bytes
from shardwise.testing.thread_group import run_ranks
from tests.formats.foreign_goldens import unpacked

SMALLEST = 16 << 20


def saved(place: Path, seed: int, **values: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    tensors = {
        "w": torch.randn(1500, 1001),  # more than one read of the smallest memory
        "half": torch.randn(7, 5).bfloat16(),
        "double": torch.randn(3, dtype=torch.float64),
        "complex": torch.randn(4, dtype=torch.complex64),
        "scalar": torch.randn(()),
        "none": torch.zeros(0, 3),
        "table": torch.arange(9),
    }
    tensors["tied"] = tensors["w"]
    sw.save(place, {"model": tensors, "lr": 0.5, **values}, step=seed, metrics={"loss": 1.0})
    return tensors


def mean(tensors: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    total = torch.zeros(tensors[0].shape, dtype=wide)
    for tensor, weight in zip(tensors, weights, strict=True):
        total.add_(tensor.to(wide), alpha=weight)
    return total.to(tensors[0].dtype)


@pytest.mark.parametrize("weights", [None, [3.0, 1.0, -0.5]])
def test_an_average_is_what_torch_computes(tmp_path: Path, weights: list[float] | None) -> None:
    places = [tmp_path / str(seed) for seed in range(3)]
    states = [saved(place, seed, epoch=seed) for seed, place in enumerate(places)]
    report = sw.average(places, tmp_path / "mean", weights=weights, max_memory=SMALLEST)
    shares = [1 / 3] * 3 if weights is None else [each / 3.5 for each in weights]
    found = sw.open(tmp_path / "mean")
    assert [*found] == [*(f"model.{name}" for name in states[0]), "lr"]
    for name, tensor in states[0].items():
        several = [state[name] for state in states]
        wanted = tensor if name == "table" else mean(several, shares)
        assert same_bytes(found[f"model.{name}"][...], wanted), name
    assert found.manifest.tensors[-1].same_as == "model.w"
    assert (found.step, found.manifest.metrics, found["lr"]) == (None, {}, 0.5)
    (left,) = report.left_out
    assert left == f"epoch: plain value differs in {places[1]}; take_first= keeps the first one"
    found.verify()


def test_the_average_of_the_same_is_the_same(tmp_path: Path) -> None:
    places = [tmp_path / str(i) for i in range(3)]
    states = [saved(place, 5) for place in places]
    sw.average(places, tmp_path / "hf", to="hf", max_file=1 << 22)
    found = sw.open(tmp_path / "hf")
    for name, tensor in states[0].items():
        if name not in ("tied", "double"):  # thirds of doubles round
            assert same_bytes(found[f"model.{name}"][...], tensor), name


def test_ranks_share_an_average(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for seed, place in enumerate(places):
        saved(place, seed)
    sw.average(places, tmp_path / "one", max_file=1 << 20)
    run_ranks(2, lambda group: sw.average(places, tmp_path / "two", max_file=1 << 20, group=group))
    other = sw.open(tmp_path / "two")
    for name, tensor in sw.open(tmp_path / "one").tensors().items():
        assert same_bytes(tensor[...], other[name][...]), name


def test_an_average_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    states = [saved(place, seed) for seed, place in enumerate(places)]
    whole = write._write_file
    written: list[Any] = []

    def failing(*args: Any) -> Any:
        if written:
            raise OSError("the disk is gone")
        written.append(args)
        return whole(*args)

    monkeypatch.setattr(write, "_write_file", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        sw.average(places, tmp_path / "mean", max_file=1 << 20)
    monkeypatch.undo()
    with pytest.raises(sw.CheckpointExistsError, match="another unfinished export"):
        sw.average(places, tmp_path / "mean", max_file=1 << 20, weights=[2, 1])
    assert sw.average(places, tmp_path / "mean", max_file=1 << 20).resumed == 1
    found = sw.open(tmp_path / "mean")
    wanted = mean([state["w"] for state in states], [0.5, 0.5])
    assert same_bytes(found["model.w"][...], wanted)


def test_what_differs_has_no_average(tmp_path: Path) -> None:
    a, b, c, d = ({"n": torch.tensor([i]), "w": torch.ones(2)} for i in range(4))
    c["w"] = torch.ones(3)
    del d["w"]
    for place, state in zip("abcd", (a, b, c, d), strict=True):
        sw.save(tmp_path / place, {"model": state, "epoch": place})
    with pytest.raises(sw.MismatchError, match=r"take_first=.*\n.*model.n: differs between"):
        sw.average([tmp_path / "a", tmp_path / "b"], tmp_path / "x")
    first = ["model.n", "epoch"]
    sw.average([tmp_path / "a", tmp_path / "b"], tmp_path / "y", take_first=first)
    assert sw.open(tmp_path / "y")["model.n"][...].tolist() == [0]
    assert sw.open(tmp_path / "y")["epoch"] == "a"
    with pytest.raises(sw.MismatchError) as caught:
        sw.average([tmp_path / each for each in "acd"], tmp_path / "z")
    said = "\n".join(caught.value.problems)
    assert "model.w: float32 [2] in " in said
    assert f"model.w: in {tmp_path / 'a'}, not in {tmp_path / 'd'}" in said
    for weights in ([1.0], [1.0, -1.0], [1.0, math.nan], [1e308, 1e308]):
        with pytest.raises(sw.StateError, match="2 finite numbers"):
            sw.average([tmp_path / "a", tmp_path / "b"], tmp_path / "z", weights=weights)
    with pytest.raises(sw.MismatchError, match=r"take_first= has patterns .*\n  - epochs"):
        sw.average([tmp_path / "a", tmp_path / "b"], tmp_path / "z", take_first=["epochs"])
    (tmp_path / "link").symlink_to("a")
    for again in ("a", "link", "../" + tmp_path.name + "/a"):
        with pytest.raises(sw.StateError, match="twice"):
            sw.average([tmp_path / "a", tmp_path / again], tmp_path / "z")
    with pytest.raises(sw.StateError, match="two or more checkpoints"):
        sw.average([tmp_path / "a"], tmp_path / "z")


@pytest.mark.parametrize("case", ["patterns", "wholes", "transposed"])
def test_a_merge_is_what_peft_merges(tmp_path: Path, case: str) -> None:
    place = unpacked("peft", tmp_path) / "peft" / case
    config = place / "base" / "config.json"
    sw.merge_lora(place / "base", place / "adapter", tmp_path / "hf", to="hf", config=config)
    wanted = safetensors.torch.load_file(place / "merged" / "model.safetensors")
    base = safetensors.torch.load_file(place / "base" / "model.safetensors")
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert any(not same_bytes(base[name], wanted[name]) for name in base)
    for name, tensor in wanted.items():
        assert same_bytes(found[name], tensor), name


class Adapted(nn.Module):
    """A layer that is trained by LoRA, of one's own making."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = base.weight
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.randn(base.out_features, rank))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_adapter_of_ours_is_merged(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).to(dtype)
    tuned = nn.Sequential(Adapted(model[0], 4), Adapted(model[1], 4))
    adapter = {name: p for name, p in tuned.named_parameters() if "lora" in name}
    sw.save(tmp_path / "base", {"model": model, "epoch": 1}, step=2)
    sw.save(tmp_path / "adapter", {"adapter": adapter})
    with pytest.raises(sw.StateError, match="pass its LoRA alpha as alpha="):
        sw.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    sw.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", alpha=6)
    found = sw.open(tmp_path / "merged")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for i in range(2):
        a, b = (adapter[f"{i}.lora_{side}"].detach().to(wide) for side in "ab")
        wanted = (model[i].weight.detach().to(wide) + (b @ a) * 1.5).to(dtype)
        assert same_bytes(found[f"model.{i}.weight"][...], wanted)
        assert same_bytes(found[f"model.{i}.bias"][...], model[i].bias)
    assert (found.step, found["epoch"]) == (2, 1)


def test_parts_of_a_merge_are_parts_of_the_whole(tmp_path: Path) -> None:
    """Many reads and tiles, of whole numbers, so that every order of summing gives the same."""
    torch.manual_seed(2)
    base = torch.randint(-9, 9, (1500, 2100)).float()
    a, b = torch.randint(-9, 9, (64, 2100)).float(), torch.randint(-9, 9, (1500, 64)).float()
    sw.save(tmp_path / "base", {"model": {"x.weight": base}})
    sw.save(tmp_path / "adapter", {"x": {"lora_A": {"weight": a}, "lora_B": {"weight": b}}})
    options: dict[str, Any] = {"alpha": 32, "max_memory": SMALLEST, "max_file": 5_000_000}
    sw.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "new", **options)
    assert same_bytes(sw.open(tmp_path / "new")["model.x.weight"][...], base + (b @ a) * 0.5)


def test_what_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    place = unpacked("peft", tmp_path) / "peft" / "patterns"
    config = json.loads((place / "adapter" / "adapter_config.json").read_text())

    def refused(match: str, error: type[Exception] = sw.StateError, **changed: Any) -> None:
        path = place / "adapter" / "adapter_config.json"
        path.write_text(json.dumps({**config, **changed}))
        with pytest.raises(error, match=match):
            sw.merge_lora(place / "base", place / "adapter", tmp_path / "x")

    refused("use_dora=True", use_dora=True)
    refused("peft_type='IA3'", peft_type="IA3")
    refused("changed the base", init_lora_weights="pissa_niter_4")
    refused("only plain module names", alpha_pattern={"(a+)+": 3})
    refused(
        "the rank is 2, but adapter_config.json has r=4", sw.MismatchError, r=4, rank_pattern={}
    )
    refused("adapter_config.json: ", sw.FormatError, r="many")
    sw.save(tmp_path / "other", {"model": {"y.weight": torch.ones(2, 2)}})
    (place / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(sw.MismatchError, match=r"(?s)root= to the key.*q_proj.weight"):
        sw.merge_lora(tmp_path / "other", place / "adapter", tmp_path / "x")
    table = nn.Embedding(4, 3)
    tied = nn.ModuleDict({"embed": table, "head": nn.Linear(3, 4, bias=False)})
    tied["head"].weight = table.weight
    sw.save(tmp_path / "tied", {"model": tied})
    factors = {"lora_a": torch.ones(1, 3), "lora_b": torch.ones(4, 1)}
    sw.save(tmp_path / "adapter", {"adapter": {"head": factors}})
    for alpha in (math.nan, math.inf, "1"):
        with pytest.raises(sw.StateError, match="expected a finite number"):
            sw.merge_lora(tmp_path / "other", tmp_path / "adapter", tmp_path / "x", alpha=alpha)
    with pytest.raises(sw.MismatchError, match="tied to"):
        sw.merge_lora(tmp_path / "tied", tmp_path / "adapter", tmp_path / "x", alpha=1)


MEASURED = """
import resource, sys
import torch
import shardwise as sw

a, b, adapter, mean, merged = sys.argv[1:]
sw.open(a)["model.x.weight"][0:1]
torch.ones(64, 64) @ torch.ones(64, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sw.average([a, b], mean, max_memory=16 << 20)
sw.merge_lora(a, adapter, merged, alpha=1.0, max_memory=16 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    large = {"x.weight": torch.zeros(3072, 8192, dtype=torch.bfloat16)}  # 48 MiB
    factors = {"lora_a": torch.zeros(32, 8192), "lora_b": torch.zeros(3072, 32)}
    for name in "ab":
        sw.save(tmp_path / name, {"model": large})
    sw.save(tmp_path / "adapter", {"adapter": {"x": factors}})
    places = [str(tmp_path / each) for each in ("a", "b", "adapter", "mean", "merged")]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *places], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) <= 24 << 20
