"""Engines of DeepSpeed, saved and loaded as they are, whatever ZeRO makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.breadth import mostly_long
from tests.formats.conftest import run
from tests.formats.programs.small_model import Model, optimizer_of, scheduler_of, tokens_of
from tests.multirank.test_matrix import contents
from tests.tools.gang import Gang

pytestmark = [
    pytest.mark.timeout(300),  # the first test waits for all engines
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None,
        reason="DeepSpeed is not installed: pip install '.[frameworks]'",
    ),
]

# Trained on four ranks: name and case.
TRAINED = {
    "float32": "zero3-float32",
    "bfloat16": "zero3-sub-groups",
    "float16": "zero2-float16",
    "sgd": "zero1-sgd",
}
# What goes on from them, on two: name, case and source. Those of one precision are one run. A
# source comes before what goes on from it, and is in QUICK if that is.
RESUMED = {
    "zero0": ("zero0-float32", "float32"),
    "round-robin": ("zero2-round-robin", "plain"),
    "zero3": ("zero3-float32", "round-robin"),
    "bfloat16-zero0": ("zero0-bfloat16", "bfloat16"),
    "bfloat16-zero1": ("zero1-bfloat16-optimizer", "bfloat16-zero0"),
    "bfloat16-fused": ("zero0-fused", "bfloat16-zero1"),
    "bfloat16-aligned": ("zero2-aligned", "bfloat16-fused"),
    "bfloat16-offload": ("zero2-offload", "bfloat16"),
    "bfloat16-persistent": ("zero3-persistent", "bfloat16-native"),
    "float16-zero0": ("zero0-float16", "float16"),
    "float16-zero2": ("zero2-float16", "float16"),
    "sgd-zero1": ("zero1-sgd", "sgd"),
}
QUICK = {*TRAINED, "round-robin", "zero3", "bfloat16-offload", "bfloat16-persistent"}
QUICK |= {"float16-zero2"}


def origin(name: str) -> str:
    """What a run began from."""
    while name in RESUMED:
        name = RESUMED[name][1]
    return name.removesuffix("-native")


def run_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        tokens = tokens_of(step)
        loss = nn.functional.cross_entropy(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def plain(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(seed)
    model = Model()
    optimizer = optimizer_of(model)
    return model, optimizer, scheduler_of(optimizer)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of the runs that the selected tests need."""
    is_long = "not long" not in request.config.getoption("markexpr")
    names = [name for name in RESUMED if name in QUICK or is_long]
    root = tmp_path_factory.mktemp("engines")
    parts = plain(seed=0)
    run_of(*parts, range(3))
    sw.save(root / "plain", state_of(*parts))
    torch.save({"losses": run_of(*parts, range(3, 5))}, root / "plain.expected.pt")
    trained = [f"{name}:{case}" for name, case in TRAINED.items()] + ["stages:pipeline-zero1"]
    resumed = [":".join((name, *RESUMED[name])) for name in names]
    resumed.append("fewer-stages:pipeline-bfloat16:stages")
    run("live_deepspeed.py", str(root), *trained, "--", "2", str(root), *resumed, ranks=4)
    return root


def expected(root: Path, name: str) -> dict[str, Any]:
    held: dict[str, Any] = torch.load(root / f"{name}.expected.pt", weights_only=True)
    return held


@pytest.mark.parametrize(
    "name", mostly_long(sorted({*TRAINED, *RESUMED} - {"bfloat16-fused"}), QUICK)
)
def test_all_is_as_deepspeed_gathers_it(runs: Path, name: str) -> None:
    checkpoint, held = sw.open(runs / name), expected(runs, name)
    wanted = {f"model.{key}": tensor for key, tensor in held["parameters"].items()}
    wanted |= {f"optimizer.{key}": tensor for key, tensor in held["moments"].items()}
    for kind in ("frozen", "buffers"):
        wanted |= {f"model.{key}": tensor for key, tensor in held[kind].items()}
    for key, tensor in wanted.items():
        saved = checkpoint[key][...]
        assert (saved.dtype, saved.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(saved, tensor), key
    steps = {f"optimizer.{key}.step" for key in held["parameters"]} - {*wanted}
    tensors = {key for key in checkpoint if isinstance(checkpoint[key], sw.SavedTensor)}
    assert tensors - {*wanted} == {"model.head.weight"} | (set() if "sgd" in name else steps)


@pytest.mark.parametrize("name", mostly_long(RESUMED, QUICK))
def test_it_goes_on_as_if_nothing_had_happened(runs: Path, name: str) -> None:
    before, after = contents(runs / origin(name)), contents(runs / name)
    of_engines = {key for key in after if key.startswith("deepspeed.")}
    if origin(name) == "plain":
        assert {after.pop(key) for key in of_engines} == {0}
    if name == "float16-zero0":  # its loss scaler has less to it
        assert before.pop("deepspeed.loss_scaler").pop("cur_hysteresis") == 2
        before["deepspeed.loss_scaler"] = after["deepspeed.loss_scaler"]
    assert after == before
    wanted = expected(runs, origin(name))["losses"]
    # The engines place weights and gradients otherwise in memory, and so round otherwise.
    close = 1e-5 if expected(runs, name)["module"]["scale"].dtype == torch.float32 else 1e-2
    assert expected(runs, name)["losses"] == pytest.approx(wanted, abs=close)


@pytest.mark.parametrize("name", mostly_long(RESUMED, QUICK))
def test_the_module_computes_with_the_weights_that_were_loaded(runs: Path, name: str) -> None:
    held = expected(runs, name)
    for key, master in held["parameters"].items():
        assert torch.equal(held["module"][key], master.to(held["module"][key].dtype)), key


def test_what_the_engine_counts_is_restored(runs: Path) -> None:
    for name in ("bfloat16-offload", "bfloat16-persistent", "float16-zero2"):
        assert expected(runs, name)["counts"] == [3, 48, 3]
    for name in ("float16", "float16-zero2"):
        scaler = sw.open(runs / name)["deepspeed.loss_scaler"]
        assert (scaler["cur_scale"], scaler["cur_iter"], scaler["last_overflow_iter"]) == (
            16,
            3,
            -1,
        )
        assert expected(runs, name)["scale"] == 16


def test_one_process_goes_on_without_deepspeed(runs: Path) -> None:
    parts = plain(seed=1)
    sw.load(runs / "float32", state_of(*parts))
    wanted = expected(runs, "float32")["losses"]
    assert run_of(*parts, range(3, 5)) == pytest.approx(wanted, abs=1e-5)


def go_on_sharded(root: str, source: str) -> list[float]:
    model, optimizer, _ = plain(seed=1)
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model, ignored_params={model.scale, *model.frozen.parameters()})
    optimizer = optimizer_of(model)
    state = state_of(model, optimizer, scheduler_of(optimizer))
    sw.load(f"{root}/{source}", state)
    sw.save(f"{root}/sharded", state)
    return run_of(model, optimizer, state["scheduler"], range(3, 5))


@pytest.mark.ranks
def test_three_sharded_processes_go_on_without_deepspeed(runs: Path, gang: Gang) -> None:
    losses = gang.run(go_on_sharded, str(runs), "float32", world=3)[0]
    before = contents(runs / "float32")
    assert contents(runs / "sharded") == {k: v for k, v in before.items() if k[:5] != "deeps"}
    assert losses == pytest.approx(expected(runs, "float32")["losses"], abs=1e-5)


def test_pipelines_go_on_with_fewer_ranks(runs: Path) -> None:
    assert contents(runs / "fewer-stages") == contents(runs / "stages")
    for name, ranks in (("stages", 4), ("fewer-stages", 2)):
        checkpoint = sw.open(runs / name)
        held = [torch.load(runs / f"{name}.expected-{rank}.pt") for rank in range(ranks)]
        for key, tensor in (item for each in held for item in each.items()):
            assert torch.equal(checkpoint[key][...], tensor), key
        tensors = {key for key in checkpoint if isinstance(checkpoint[key], sw.SavedTensor)}
        steps = {key for key in tensors if key.endswith(".step")}
        assert tensors - steps == {key for each in held for key in each}
