"""Arrays and flat states in the drop-in for torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shardwise as sw
from shardwise.integrations import dcp
from tests.formats.comparing import assert_same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
WRITERS = pytest.mark.parametrize("writer", [dcp, torch_dcp], ids=["ours", "torch"])


@WRITERS
def test_numpy_arrays_come_back_as_arrays(writer: ModuleType, tmp_path: Path) -> None:
    state: dict[str, Any] = {
        "losses": np.array([0.5, 0.25]),
        "model": {"w": torch.ones(2), "table": np.arange(3, dtype=np.int16)},
        "count": np.array(7),
        "list": [np.zeros(0), {"x": np.ones(1)}],
    }
    writer.save(state, checkpoint_id=tmp_path / "a")
    target: dict[str, Any] = {
        "losses": None,
        "model": {"w": torch.zeros(2), "table": None},
        "count": 0,
        "list": [None, {"x": None}],
    }
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert repr(target) == repr(state)
    assert sw.open(tmp_path / "a")["model.table"][...].tolist() == [0, 1, 2]


@WRITERS
def test_the_state_of_a_module_without_a_key(writer: ModuleType, tmp_path: Path) -> None:
    """Its names in the checkpoint begin with `model.`, but DCP knows them without this prefix."""
    module = torch.nn.BatchNorm1d(3)
    writer.save(module.state_dict(), checkpoint_id=tmp_path / "a")
    target = torch.nn.BatchNorm1d(3)
    torch.nn.init.normal_(target.weight)
    dcp.load(target.state_dict(), checkpoint_id=tmp_path / "a")
    assert torch.equal(target.weight, module.weight)
    assert set(sw.open(tmp_path / "a")) >= {f"model.{name}" for name in module.state_dict()}


@WRITERS
def test_values_with_tensors_beside_parameters(writer: ModuleType, tmp_path: Path) -> None:
    """Such a state is not that of a module, so its names stay."""
    writer.save({"w": torch.ones(2), "pair": (torch.ones(1), 1)}, checkpoint_id=tmp_path / "a")
    assert {"w", "pair", "pair.0"} <= set(sw.open(tmp_path / "a"))


@WRITERS
@pytest.mark.parametrize("keys", [("model", "optim"), ("", "optim"), ("", "")], ids=str)
def test_flattened_optimizers(writer: ModuleType, keys: tuple[str, str], tmp_path: Path) -> None:
    """Each hyperparameter of each parameter has a name, as in checkpoints of torchtitan."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    groups = [{"params": [*each.parameters()], "lr": 0.25 * i} for i, each in enumerate(module)]
    optimizer = torch.optim.AdamW(groups)
    module(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for key, part in zip(keys, get_state_dict(module, optimizer, options=options), strict=True):
            state |= {key: part} if key else part
        return state

    expected = copy.deepcopy(state_dict())
    writer.save(expected, checkpoint_id=tmp_path / "a")
    for parameter in module.parameters():
        parameter.data.fill_(9)
        optimizer.state[parameter]["exp_avg"].fill_(9)
    for group in optimizer.param_groups:
        group["lr"] = 9.0
    target = state_dict()
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert_same(target, expected)


def test_a_value_that_cannot_be_copied_or_pickled_is_named(tmp_path: Path) -> None:
    state = {"a": {"b": [1, threading.Lock()]}}
    with pytest.raises(CheckpointException, match=r"a\.b: the planner cannot pickle"):
        dcp.save(state, checkpoint_id=tmp_path / "a")
    with pytest.raises(sw.StateError, match=r"^a\.b\.1: a lock that cannot be copied"):
        dcp.async_save(state, checkpoint_id=tmp_path / "a")
    assert not (tmp_path / "a").exists()
