"""Files that verl saves on each rank: FSDP2, and FSDP1 with sharded tensors and flat optimizers."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.parts.formats.readers.fsdp_ranks.flat_units import find_flat_units
from tests.breadth import examples
from tests.formats.altering import open_with_altered_pickle
from tests.formats.comparing import assert_same
from tests.multirank.models import Block, Model
from tests.tools.gang import Gang

KINDS = (
    *("fsdp2", "fsdp2-hsdp", "tensors", "dtensors", "original", "hsdp", "hsdp-groups", "tied"),
    "original-tied",
)
ON_ONE_RANK = ("tensors", "tied")
FLAT = ("tensors", "dtensors", "hsdp", "hsdp-groups", "tied")
WORLD = 4

pytestmark = pytest.mark.ranks


def wrap(kind: str) -> nn.Module:
    """Return the model under FSDP2 or FSDP1, as verl and other trainers wrap it."""
    torch.manual_seed(0)
    model = Model()
    shape = (2, 2) if "hsdp" in kind else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ddp", "fsdp")[-len(shape) :])
    if kind.startswith("fsdp2"):
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"use_orig_params": "original" in kind}
    if "tied" in kind:
        model.head.weight = model.embed.weight  # type: ignore[union-attr]
    if kind in ("dtensors", "hsdp"):
        options["device_mesh"] = mesh
    if "hsdp" in kind:
        options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if kind == "hsdp-groups":
        options["process_group"] = mesh.get_group("fsdp"), mesh.get_group("ddp")
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **options,
    )


def random_states() -> dict[str, Any]:
    """Return the random states as verl saves them."""
    return {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def save_all(root: str, kinds: tuple[str, ...]) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    for kind in kinds:
        save(root, kind)


def save(root: str, kind: str) -> None:
    """Save as verl's `FSDPCheckpointManager`; rank 0 adds the whole tensors."""
    rank, place = dist.get_rank(), Path(root, kind, "global_step_8", "actor")
    model = wrap(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    random.seed(rank)
    for seed in range(2):
        torch.manual_seed(10 * rank + seed)
        model(torch.randint(0, 11, (2, 3))).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    full = StateDictOptions(full_state_dict=True)
    whole = get_state_dict(model, optimizer, options=full)
    if not kind.startswith("fsdp2"):
        FullyShardedDataParallel.set_state_dict_type(
            model,
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(),
            ShardedOptimStateDictConfig(),
        )
    states = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "extra_state": {"lr_scheduler": scheduler.state_dict(), "rng": random_states()},
    }
    place.mkdir(parents=True, exist_ok=True)
    for name, state in states.items():
        torch.save(state, place / f"{name}_world_size_{dist.get_world_size()}_rank_{rank}.pt")
    if rank == 0:
        (place / "fsdp_config.json").write_text('{"FSDP_version": 1, "world_size": 4}')
        (place / "huggingface").mkdir(exist_ok=True)
        (place / "huggingface" / "config.json").write_text('{"model_type": "test"}')
        torch.save(whole, f"{root}/{kind}.whole.pt")


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp-ranks")
    gang.run(save_all, str(root), KINDS, world=WORLD)
    gang.run(save_all, str(root / "one"), ON_ONE_RANK, world=1)
    return root


def place_of(saved: Path, kind: str) -> Path:
    return saved / kind / "global_step_8" / "actor"


@pytest.mark.parametrize("kind", [*KINDS, *(f"one/{kind}" for kind in ON_ONE_RANK)])
def test_every_byte_is_read(saved: Path, kind: str) -> None:
    model, optimizer = torch.load(saved / f"{kind}.whole.pt")
    found = sw.open(place_of(saved, kind))
    expected = {f"model.{name}": each for name, each in model.items()}
    for name, state in optimizer["state"].items():
        expected |= {f"optimizer.{name}.{key}": each for key, each in state.items()}
    tensors = found.tensors()
    assert sorted(tensors) == sorted(expected)
    for name, tensor in expected.items():
        assert_same(tensors[name][...], tensor)
    assert (found.step, found.world_size) == (8, 1 if kind.startswith("one/") else WORLD)
    assert found["scheduler"]["last_epoch"] == 2  # type: ignore[index]
    assert [line.partition(":")[0] for line in found.left_out] == [
        "huggingface/",
        "extra_state.rng",
    ]
    found.verify()


@pytest.mark.parametrize("kind", ["fsdp2-hsdp", "hsdp-groups"])
def test_a_run_goes_on(saved: Path, kind: str, tmp_path: Path) -> None:
    whole_model, whole_optimizer = torch.load(saved / f"{kind}.whole.pt")
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with sw.Checkpointer(tmp_path, memory=None, start_from=place_of(saved, kind)) as checkpointer:
        assert checkpointer.restore(state) == 8
    assert_same(sorted(model.state_dict().items()), sorted(whole_model.items()))
    for name, parameter in model.named_parameters():
        loaded, expected = optimizer.state[parameter], whole_optimizer["state"][name]
        assert_same(sorted(loaded.items()), sorted(expected.items()))
    assert scheduler.last_epoch == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)


@pytest.mark.parametrize("kind", ["fsdp2", "dtensors"])
def test_export_to_hugging_face(saved: Path, kind: str, tmp_path: Path) -> None:
    place = place_of(saved, kind)
    sw.export(place, tmp_path / "hf", to="hf")
    model, _ = torch.load(saved / f"{kind}.whole.pt")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same(sorted(exported.items()), sorted(model.items()))


def test_missing_files_and_several_world_sizes_are_refused(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "actor"
    shutil.copytree(place_of(saved, "tensors"), place)
    (place / "optim_world_size_4_rank_2.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"1 is missing: optim_world_size_4_rank_2\.pt"):
        sw.open(place)
    for kind in ("optim", "extra_state"):
        for path in place.glob(f"{kind}_*.pt"):
            path.unlink()
    assert "model.embed.weight" in sw.open(place)
    with pytest.raises(sw.FormatError, match=r"only one rank's part of .*a ShardedTensor of shape"):
        sw.open(place / "model_world_size_4_rank_1.pt")
    (place / "model_world_size_4_rank_3.pt").unlink()
    with pytest.raises(sw.FormatError, match=r"missing: model_world_size_4_rank_3\.pt"):
        sw.open(place)
    shutil.copy(place / "model_world_size_4_rank_0.pt", place / "model_world_size_2_rank_0.pt")
    with pytest.raises(sw.FormatError, match=r"several world sizes: 2 \(model_world.* and 4 \("):
        sw.open(place)
    (place / "model_world_size_2_rank_0.pt").unlink()
    shutil.copy(place / "model_world_size_4_rank_0.pt", place / "model_world_size_4_rank_7.pt")
    with pytest.raises(sw.FormatError, match=r"the file of rank 7, but the world size is 4"):
        sw.open(place)
    for path in place.glob("*.pt"):
        path.unlink()
    (place / "model_world_size_9999999_rank_0.pt").touch()
    with pytest.raises(sw.FormatError, match=r"has the world size 9999999: expected 1 to"):
        sw.open(place)


def test_a_shard_of_another_rank_is_refused(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "actor"
    shutil.copytree(place_of(saved, "tensors"), place)
    shutil.copy(place / "model_world_size_4_rank_0.pt", place / "model_world_size_4_rank_1.pt")
    with pytest.raises(sw.FormatError, match=r"3 of its 4 shards: missing are those at \[1\]"):
        sw.open(place)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_ranks_of_two_steps_are_refused(saved: Path, tmp_path: Path, rank: int) -> None:
    name = f"world_size_{WORLD}_rank_{rank}.pt"
    for kind in ("optim", "extra_state"):
        place = tmp_path / kind
        shutil.copytree(place_of(saved, "tensors"), place)
        state = torch.load(place / f"{kind}_{name}", weights_only=False)
        if kind == "optim":
            for entry in state["state"].values():
                entry["step"] += 1
        else:
            state["lr_scheduler"]["last_epoch"] += 1
        torch.save(state, place / f"{kind}_{name}")
        with pytest.raises(
            sw.FormatError, match=r"(step is a plain|last_epoch differs).*different saves"
        ):
            sw.open(place)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Tensors of all kinds of names, dtypes and shapes."""
    dtypes = [
        *(torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
        *(torch.bool, torch.int64, torch.complex64, torch.uint16),
    ]
    values = torch.arange(64, dtype=torch.uint8)
    tensors = {f"{dtype}": (values % 2).view(dtype).reshape(-1, 1) for dtype in dtypes}
    layer = "base_model.model.layers.0.self_attn.q_proj"
    names = [f"{layer}.lora_A.default.weight", f"{layer}.base_layer.weight", "a", "a.b", "a..c"]
    names += ["", ".", "d/e", "../../f", "ü ß\n", "__class__", "0", "\\", "x" * 300]
    tensors |= {name: values.reshape(16, 4) + i for i, name in enumerate(names)}
    shapes = {"one": (1, 1), "uneven": (3, 5, 1), "none": (0, 3), "empty-rows": (3, 0)}
    return tensors | {name: torch.rand(shape) for name, shape in shapes.items()}


def save_odd(root: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    tensors = odd_tensors()
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)], src_data_rank=None)
        for name, tensor in tensors.items()
    }
    state["scalar"] = tensors["scalar"] = torch.tensor(3.5, dtype=torch.bfloat16)
    torch.save(state, f"{root}/model_world_size_4_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        torch.save(tensors, f"{root}/whole.pt")


def test_odd_names_dtypes_and_shapes_through_links(gang: Gang, tmp_path: Path) -> None:
    place = tmp_path / "links"
    place.mkdir()
    gang.run(save_odd, str(tmp_path), world=WORLD)
    for path in tmp_path.glob("model_*.pt"):
        (place / path.name).symlink_to(path)
    read = sw.open(place).state_dict("model")
    assert_same(sorted(read.items()), sorted(torch.load(tmp_path / "whole.pt").items()))


def test_optimizer_without_a_certain_layout_is_left_out(saved: Path, tmp_path: Path) -> None:
    place = tmp_path / "actor"
    shutil.copytree(place_of(saved, "tensors"), place)
    for path in place.glob("optim_*.pt"):
        state = torch.load(path)
        for entry in state["state"].values():
            entry |= {key: torch.zeros(7) for key in ("exp_avg", "exp_avg_sq")}
        torch.save(state, path)
    found = sw.open(place)
    assert "model.embed.weight" in found
    assert any("5 flat parameters do not fit the 26 parameters" in line for line in found.left_out)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    reason = r"optimizer\.param_groups: left out: .*5 flat parameters do not fit the 26"
    with pytest.raises(sw.MismatchError, match=reason):
        sw.load(place, {"model": model, "optimizer": optimizer})


@examples(
    30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.integers(0, 2**31), st.integers(0, 255), st.integers(1, 3))
def test_altered_pickles_are_read_or_refused(saved: Path, at: int, byte: int, count: int) -> None:
    name = "model_world_size_4_rank_0.pt"
    open_with_altered_pickle(place_of(saved, "tensors"), name, at, byte, count)


LAYER = {
    "attention.query.weight": 48,
    "attention.out.weight": 48,
    "mlp.up.weight": 100,
    "norm.weight": 6,
}


def layers(count: int) -> dict[str, int]:
    """The sizes of the parameters of a transformer, by name."""
    named = {f"layers.{i}.{name}": size for i in range(count) for name, size in LAYER.items()}
    return {"embed.weight": 60, **named, "norm.weight": 6, "head.weight": 60}


@pytest.mark.parametrize(
    ("units", "count"),
    [
        ((), 3),
        (("layers.#.",), 3),
        (("layers.#.", "embed.", "head."), 2),
        (("layers.#.attention.", "layers.#.mlp."), 4),
        (("layers.#.", "layers.#.attention."), 3),
        (("layers.#.", "layers.#.mlp.up."), 1),
    ],
)
@pytest.mark.parametrize("shards", [1, 4, 7])
def test_units_are_found_from_sizes(units: tuple[str, ...], count: int, shards: int) -> None:
    sizes = layers(count)
    opened: list[str] = [""]  # in the order in which FSDP lists flat parameters
    for name in sizes:
        parts = name.split(".")
        for length in range(1, len(parts)):
            prefix = ".".join(parts[:length]) + "."
            pattern = ".".join("#" if part.isdigit() else part for part in parts[:length]) + "."
            if pattern in units and prefix not in opened:
                opened.append(prefix)
    expected = [
        max((i for i, p in enumerate(opened) if name.startswith(p)), key=lambda i: len(opened[i]))
        for name in sizes
    ]
    totals = [0] * len(opened)
    for unit, size in zip(expected, sizes.values(), strict=True):
        totals[unit] += size
    padded = [-(-total // shards) * shards for total in totals]
    assert find_flat_units(list(sizes), list(sizes.values()), padded, shards) == expected


def test_two_possible_layouts_are_no_layout() -> None:
    names, sizes = ["a.first.weight", "b.first.weight", "c.weight"], [8, 8, 8]
    assert find_flat_units(names, sizes, [16, 8], 2) is None
