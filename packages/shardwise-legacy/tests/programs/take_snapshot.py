"""Take the snapshot of `golden/torchsnapshot.tar.xz`, and make its `expected.pt`.

PYTHONPATH=. torchrun --nproc-per-node 2 take_snapshot.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torchsnapshot import Snapshot, StateDict
from torchsnapshot.knobs import override_max_chunk_size_bytes

from tests.compat.foreign.make_bytecheckpoint import model_of, stepped


def take_snapshot(folder: Path) -> dict[str, torch.Tensor]:
    """Save a module under FSDP1, a replicated module, and its optimizer; tensors are chunked."""

    def state(seed: int) -> dict[str, Any]:
        sharded = FullyShardedDataParallel(model_of(seed), device_id=torch.device("cpu"))
        FullyShardedDataParallel.set_state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT)
        plain = model_of(seed + 10)
        big = torch.arange(60.0).reshape(12, 5) * seed
        more = StateDict(epoch=seed, rate=0.5, name="a/b", flags=[True, {"x": b"12"}], big=big)
        return {"fsdp": sharded, "plain": plain, "optimizer": stepped(plain, seed), "more": more}

    with override_max_chunk_size_bytes(80):
        Snapshot.take(str(folder), state(2), replicated=["plain/**", "more/big"])
    loaded = state(1)
    Snapshot(str(folder)).restore(loaded)
    with FullyShardedDataParallel.state_dict_type(loaded["fsdp"], StateDictType.FULL_STATE_DICT):
        full = loaded["fsdp"].state_dict()
    found = {f"fsdp.{name}": value for name, value in full.items()}
    found |= {f"plain.{name}": value for name, value in loaded["plain"].state_dict().items()}
    for number, values in loaded["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.state.{number}.{key}": value for key, value in values.items()}
    return found | {"more.big": loaded["more"]["big"]}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    place = Path(sys.argv[1])
    expected = take_snapshot(place)
    if dist.get_rank() == 0:
        torch.save(expected, place / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()
