"""Files that verl saves on each rank: frozen parameters, and models that are not sharded."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.tools.gang import Gang

pytestmark = pytest.mark.ranks


def make_model(seed: int, *, frozen: bool) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or name.startswith("2"))
    return model


def save(root: str, strategy: ShardingStrategy, frozen: bool) -> None:
    """Save FSDP1 with `use_orig_params=True`. As in verl, the optimizer gets frozen parameters."""
    warnings.simplefilter("ignore")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = FullyShardedDataParallel(
        make_model(0, frozen=frozen),
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.randn(2, 3)).square().sum().backward()
    optimizer.step()
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    for name, state in {"model": model.state_dict(), "optim": optimizer.state_dict()}.items():
        torch.save(state, f"{root}/{name}_world_size_{world}_rank_{rank}.pt")
    full = StateDictOptions(full_state_dict=True)
    whole = get_state_dict(model, optimizer, options=full)
    if rank == 0:
        torch.save(whole, f"{root}/whole.pt")


@pytest.mark.parametrize(
    ("world", "strategy", "frozen"),
    [
        (2, ShardingStrategy.FULL_SHARD, True),
        (1, ShardingStrategy.NO_SHARD, False),
        (2, ShardingStrategy.NO_SHARD, False),
    ],
)
def test_the_optimizer_is_read(
    gang: Gang, tmp_path: Path, world: int, strategy: ShardingStrategy, frozen: bool
) -> None:
    gang.run(save, str(tmp_path), strategy, frozen, world=world)
    expected_model, expected = torch.load(tmp_path / "whole.pt", weights_only=False)
    model = make_model(1, frozen=frozen)
    optimizer = torch.optim.AdamW(model.parameters())
    sw.load(tmp_path, {"model": model, "optimizer": optimizer})
    assert_same(model.state_dict(), expected_model)
    assert optimizer.param_groups[0]["lr"] == 0.25
    names = [name for name, _ in model.named_parameters()]
    found = optimizer.state_dict()["state"]
    expected_state = {name: expected["state"][name] for name in names if name in expected["state"]}
    assert_same({names[i]: entry for i, entry in sorted(found.items())}, expected_state)
    assert len(found) == (2 if frozen else 8)
