"""Checkpoints of PyTorch DCP under each parallelism, and the values that torch loads from them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.multirank.models import build, module_of, train

NESTED = ("ddp", "fsdp1", "fsdp2", "fsdp2_uneven", "hsdp")
FLAT = ("tp", "fsdp_tp", "pipeline_fsdp")


def save_with_dcp(kinds: list[str], root: str) -> None:
    """Train for two steps under each parallelism, and save as torch's documentation does."""
    warnings.simplefilter("ignore")
    for kind in kinds:
        state = build(kind, 1)
        train(state)
        options = StateDictOptions(flatten_optimizer_state_dict=kind in FLAT)
        module = module_of(state["model"])
        model, optimizer = get_state_dict(module, state["optimizer"], options=options)
        rest = {"scheduler": state["scheduler"].state_dict(), "step": state["step"]}
        saved = {"model": model, "optimizer": optimizer, **rest}
        dcp.save(saved, checkpoint_id=f"{root}/{kind}")


def torch_loads(place: Path) -> dict[str, Any]:
    """Return the state that torch itself restores, without a template of the saved state."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(place),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return state


def named(state: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a model and an optimizer that torch restored, by the names of
    shardwise.
    """
    found = {f"model.{name}": value for name, value in state["model"].items()}
    optimizer = state["optimizer"]
    if "state" not in optimizer:
        parts = {k.removeprefix("state."): v for k, v in optimizer.items() if k[:6] == "state."}
        return found | {f"optimizer.{name}": value for name, value in parts.items()}
    for name, values in optimizer["state"].items():
        found |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return found


def settings_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the hyperparameters of each parameter that torch restored."""
    optimizer = state["optimizer"]
    if "param_groups" in optimizer:
        return {
            name: {key: value for key, value in group.items() if key != "params"}
            for group in optimizer["param_groups"]
            for name in group["params"]
        }
    found: dict[str, dict[str, Any]] = {}
    for key, value in optimizer.items():
        if key.startswith("param_groups."):
            name, _, setting = key.removeprefix("param_groups.").rpartition(".")
            found.setdefault(name, {})[setting] = value
    return found
