"""A checkpoint of every format that shardwise reads, and the values that its framework restores."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise as sw
from shardwise.parts.formats.readers import (
    accelerate,
    bytecheckpoint,
    huggingface,
    lightning,
    megatron,
    torch_save,
)
from shardwise.parts.formats.readers.dcp import reader as dcp
from shardwise.parts.formats.readers.deepspeed import reader as deepspeed
from shardwise.parts.formats.readers.deepspeed import universal
from shardwise.parts.formats.readers.fsdp_ranks import reader as fsdp_ranks
from tests.breadth import OLD_TORCH
from tests.formats.conftest import Checkpoints
from tests.formats.dcp_checkpoints import named, settings_of, torch_loads
from tests.formats.deepspeed.test_parallel import expected as ranks_had
from tests.formats.foreign_goldens import unpacked
from tests.formats.matrix.wanted import Settings, Wanted, of_names, widened
from tests.formats.test_megatron import restored_by_megatron
from tests.multirank.models import WORLDS, build, train

BUFFERS = ("scale",)  # of the model in tests/multirank
Request = pytest.FixtureRequest
Made = tuple[Path, Wanted]


@dataclass(frozen=True)
class Source:
    """A checkpoint of a format.

    `make` lets the framework write the checkpoint; it returns the path and the expected values.
    """

    name: str
    format: str
    make: Callable[[Request, Path], Made]


def of_dcp(kind: str, request: Request, folder: Path) -> Made:
    place = request.getfixturevalue("dcp_saved") / kind
    state = torch_loads(place)
    return place, of_names(named(state), settings_of(state), BUFFERS)


def of_torch_save(zipped: bool, request: Request, folder: Path) -> Made:
    """In one file, with names instead of numbers."""
    state = build("plain", 3)
    train(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
    saved = {"model": model, "optimizer": optimizer}
    torch.save(saved, folder / "last.ckpt", _use_new_zipfile_serialization=zipped)
    loaded = torch.load(folder / "last.ckpt")
    return folder / "last.ckpt", of_names(named(loaded), settings_of(loaded), BUFFERS)


def trained() -> tuple[dict[str, Any], dict[str, Any], Wanted]:
    """Return state dicts with names of a trained model and optimizer, and the expected values."""
    state = build("plain", 5)
    train(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(state["model"], state["optimizer"])
    saved = {"model": model, "optimizer": optimizer}
    return model, optimizer, of_names(named(saved), settings_of(saved), BUFFERS)


def of_accelerate(sharded: bool, request: Request, folder: Path) -> Made:
    """In the layout of `save_fsdp_model` and `save_fsdp_optimizer`."""
    model, optimizer, wanted = trained()
    if sharded:
        dcp_save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
        dcp_save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0", no_dist=True)
    else:
        torch.save(model, folder / "pytorch_model_fsdp.bin")
        torch.save(optimizer, folder / "optimizer.bin")
    return folder, wanted


def of_lightning(sharded: bool, request: Request, folder: Path) -> Made:
    """In the layout of ModelParallelStrategy, with or without `save_distributed_checkpoint`."""
    model, optimizer, wanted = trained()
    rest = {"epoch": 1, "global_step": 2, "pytorch-lightning_version": "2.6.6", "loops": {}}
    if sharded:
        saved = {"state_dict": model, "optimizer_0": optimizer}
        dcp_save(saved, checkpoint_id=folder / "step.ckpt", no_dist=True)
        torch.save(rest, folder / "step.ckpt" / "meta.pt")
    else:
        saved = {**rest, "state_dict": model, "optimizer_states": [optimizer]}
        torch.save(saved, folder / "step.ckpt")
    return folder / "step.ckpt", wanted


def of_hugging_face(suffix: str, count: int, request: Request, folder: Path) -> Made:
    """In one file, or in several with an index like that of transformers."""
    weights = dict(build("plain", 4)["model"].state_dict())
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    files = [f"{stem}-{i + 1:05}-of-{count:05}{suffix}" for i in range(count)]
    if count == 1:
        files = [f"{stem}{suffix}"]
    index = {name: files[i % count] for i, name in enumerate(weights)}
    for file in files:
        mine = {name: weight for name, weight in weights.items() if index[name] == file}
        if suffix == ".bin":
            torch.save(mine, folder / file)
        else:
            safetensors.torch.save_file(mine, folder / file, {"format": "pt"})
    if count > 1:
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": index})
        (folder / f"{stem}{suffix}.index.json").write_text(text)
    load = torch.load if suffix == ".bin" else safetensors.torch.load_file
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        loaded |= load(folder / file)
    return folder, of_names({f"model.{k}": v for k, v in loaded.items()}, {}, BUFFERS)


def save_shards(folder: str) -> None:
    """Save on two ranks with torch's writer, without the consolidation that may follow."""
    mesh = init_device_mesh("cpu", (2,))
    weights = build("plain", 4)["model"].state_dict()
    saved = {name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in weights.items()}
    warnings.simplefilter("ignore")
    dcp_save(saved, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))


def of_shards(request: Request, folder: Path) -> Made:
    request.getfixturevalue("gang").run(save_shards, str(folder), world=2)
    loaded = build("plain", 0)["model"].state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_load(loaded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return folder, of_names({f"model.{k}": v for k, v in loaded.items()}, {}, BUFFERS)


def save_by_ranks(kind: str, folder: str, verl: bool) -> dict[str, Any] | None:
    """Save one file with DTensors for each rank, or as verl; return the whole state on rank 0."""
    state = build(kind, 5)
    train(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = get_state_dict(state["model"], state["optimizer"])
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    rank, suffix = dist.get_rank(), f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    if verl:
        torch.save(parts[0], Path(folder, f"model_{suffix}"))
        torch.save(parts[1], Path(folder, f"optim_{suffix}"))
    else:
        torch.save({"model": parts[0], "optimizer": parts[1]}, Path(folder, f"rank{rank}.pt"))
    return {"model": model, "optimizer": optimizer} if rank == 0 else None


def of_ranks(kind: str, verl: bool, request: Request, folder: Path) -> Made:
    gang = request.getfixturevalue("gang")
    full = gang.run(save_by_ranks, kind, str(folder), verl, world=WORLDS[kind])[0]
    return folder, of_names(named(full), settings_of(full), BUFFERS)


def of_deepspeed(case: str, ranks: int, converted: bool, request: Request, folder: Path) -> Made:
    checkpoints: Checkpoints = request.getfixturevalue("checkpoints")
    place, expected = checkpoints.place(case, ranks), checkpoints.expected(case, ranks)
    parameters, frozen = expected["parameters"], expected["frozen"]
    state = dict(expected["moments"])
    if "sgd" not in case:
        steps = 4.0 if case == "zero0-bfloat16" else 3.0
        state |= {f"{name}.step": torch.tensor(steps) for name in parameters}
    of_matrices = [name for name in parameters if parameters[name].ndim > 1]
    rest = [name for name in parameters if parameters[name].ndim <= 1]
    wanted = Wanted(
        parameters={k: widened(v) for k, v in (parameters | frozen).items()},
        buffers={k: widened(v) for k, v in expected["buffers"].items()},
        state=state,
        groups=tuple(zip((tuple(of_matrices), tuple(rest)), expected["groups"], strict=True)),
        ties={"head.weight": "embedding.weight"},
        frozen=frozenset(frozen),
    )
    return place / "universal" if converted else place, wanted


def of_deepspeed_in_parallel(case: str, request: Request, folder: Path) -> Made:
    directory: Path = request.getfixturevalue("parallel")
    tensors = ranks_had(directory, case)
    settings = stored_settings(directory / case)
    steps = {f"optimizer.{name}.step": torch.tensor(3.0) for name in settings}
    return directory / case, of_names(tensors | steps, settings, ())


def of_megatron(kind: str, request: Request, folder: Path) -> Made:
    place = unpacked(f"megatron_{kind}", folder)
    settings = stored_settings(place)
    steps = {f"optimizer.{name}.step": torch.tensor(2.0) for name in settings}
    restored = restored_by_megatron(place, kind)
    tensors = {name: each for name, each in restored.items() if name[:7] != "module."}
    return place, of_names(tensors | steps, settings, ())


def of_bytecheckpoint(request: Request, folder: Path) -> Made:
    place = unpacked("bytecheckpoint", folder) / "global_step_3"
    return place, of_names(torch.load(folder / "expected.pt"), stored_settings(place), ())


def stored_settings(place: Path) -> dict[str, Settings]:
    """Return the hyperparameters that shardwise reads, if the framework has no names for them."""
    groups: Any = sw.open(place)["optimizer.param_groups"]
    for group in groups:  # the parallelism of experts is not a hyperparameter
        group["value"].pop("is_expert_parallel", None)
    return {member: group["value"] for group in groups for member in group["members"]}


def _sources() -> Iterable[Source]:
    for kind in ("ddp", "fsdp1", "fsdp2", "fsdp2_uneven", "hsdp", "tp", "fsdp_tp"):
        yield Source(f"dcp-{kind}", dcp.READER.name, partial(of_dcp, kind))
    yield Source("torch.save", torch_save.READER.name, partial(of_torch_save, True))
    yield Source("torch.save-legacy", torch_save.READER.name, partial(of_torch_save, False))
    for kind in ("fsdp2_uneven",) if OLD_TORCH else ("fsdp2_uneven", "fsdp_tp"):
        make = partial(of_ranks, kind, False)
        yield Source(f"torch.save-by-ranks-{kind}", torch_save.RANKS_READER.name, make)
    yield Source("fsdp-ranks", fsdp_ranks.READER.name, partial(of_ranks, "hsdp", True))
    for sharded, kind in ((True, "sharded"), (False, "whole")):
        make = partial(of_accelerate, sharded)
        yield Source(f"accelerate-{kind}", accelerate.READER.name, make)
        yield Source(f"lightning-{kind}", lightning.READER.name, partial(of_lightning, sharded))
    yield Source("hf-shards", huggingface.SHARDED_READER.name, of_shards)
    for suffix in (".safetensors", ".bin"):
        for count in (1, 3):
            make = partial(of_hugging_face, suffix, count)
            yield Source(f"hf-{count}{suffix}", huggingface.READER.name, make)
    for case, ranks in DEEPSPEED:
        make = partial(of_deepspeed, case, ranks, False)
        yield Source(f"deepspeed-{case}-{ranks}", deepspeed.READER.name, make)
    for case in ("experts-zero1", "pipeline-zero1"):
        make = partial(of_deepspeed_in_parallel, case)
        yield Source(f"deepspeed-{case}", deepspeed.READER.name, make)
    for case in ("zero1-bfloat16", "zero3-sub-groups"):
        make = partial(of_deepspeed, case, 2, True)
        yield Source(f"universal-{case}", universal.READER.name, make)
    for kind in ("plain", "fully_reshardable", "fully_sharded_model_space"):
        yield Source(f"megatron-{kind}", megatron.READER.name, partial(of_megatron, kind))
    yield Source("bytecheckpoint", bytecheckpoint.READER.name, of_bytecheckpoint)


DEEPSPEED = (
    *(("zero0-float32", 2), ("zero0-bfloat16", 2), ("zero1-bfloat16", 2), ("zero1-sgd", 2)),
    *(("zero2-float16", 2), ("zero2-bfloat16", 4), ("zero3-bfloat16", 2), ("zero3-sub-groups", 4)),
)
SOURCES = tuple(_sources())
