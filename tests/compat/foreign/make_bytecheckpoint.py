"""Make the checkpoint of ByteCheckpoint in this directory, and `expected.pt`.

    torchrun --nproc-per-node 2 make_bytecheckpoint.py FOLDER

ByteCheckpoint 0.0.2 needs TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 with the installed torch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


def stepped(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return optimizer


def bytecheckpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Save under FSDP2. The expected values are those of another run after it has loaded."""
    import bytecheckpoint as bcp

    def state(seed: int) -> dict[str, Any]:
        model = model_of(seed)
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return {"model": model, "optimizer": stepped(model, seed), "extra_state": {"epoch": seed}}

    bcp.save(str(folder / "global_step_3"), state(2), framework="fsdp2", fast_saving=False)
    dist.barrier()
    loaded = state(1)
    bcp.load(str(folder / "global_step_3"), loaded, framework="fsdp2", fast_loading=False)
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(loaded["model"], loaded["optimizer"], options=options)
    found = {f"model.{name}": value for name, value in model.items()}
    for name, values in optimizer.get("state", {}).items():
        found |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    expected = bytecheckpoint(place)
    if dist.get_rank() == 0:
        torch.save(expected, place / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()
