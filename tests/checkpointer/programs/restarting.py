"""Train on several ranks, fail once, restart, and restore from memory.

    torchrun … restarting.py HOW DIRECTORY

HOW says who restarts the training: `nobody`; `torchrun`, with new processes; `function`, which
calls the training again in the same processes; or `nvrx`, NVIDIA's wrapper that does the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardwise as sw

STEPS, FAILING_STEP = 6, 4


def join(attempt: int) -> None:
    """Create the process group of an attempt. Each attempt needs separate keys in the store."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        timeout=timedelta(seconds=60),
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt-{attempt}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        # In the first attempt, rank 0 waits this long for the failed rank, which waits in the next.
        timeout=timedelta(seconds=60 if attempt else 10),
    )


def train(directory: Path, attempt: int, *, fails: bool) -> None:
    """Train until the last step; rank 1 fails in the first attempt."""
    join(attempt)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = fully_shard(torch.nn.Linear(6, 5), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    memory = sw.Memory(snapshot_every=1, dir=str(directory / "memory"), rescue=False)
    with sw.Checkpointer(
        directory / "run", memory=memory, save_every=1000, save_at_end=False
    ) as checkpointer:
        step = checkpointer.restore(state) or 0
        if checkpointer.last_restore is not None:
            record(directory, {"source": checkpointer.last_restore.source, "restored": step})
        while step < STEPS:
            step += 1
            if fails and attempt == 0 and step == FAILING_STEP and dist.get_rank() == 1:
                raise RuntimeError("rank 1 fails")
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            handle = checkpointer.save(step, state)
            if handle is not None:
                handle.committed(60)
            record(directory, {"step": step, "loss": loss.item().hex(), "pid": os.getpid()})


def record(directory: Path, line: dict[str, object]) -> None:
    """Append what rank 0 did."""
    if dist.get_rank() == 0:
        with (directory / "record.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def call_again(directory: Path) -> None:
    """Call the training again after a failure, in the same process."""
    with contextlib.suppress(RuntimeError, sw.ShardwiseError):
        train(directory, 0, fails=True)
    dist.destroy_process_group()
    train(directory, 1, fails=True)
    dist.destroy_process_group()


def call_with_nvrx(directory: Path) -> None:
    """Let NVIDIA's wrapper call the training again. The wrapper also destroys the process group."""
    from nvidia_resiliency_ext import inprocess

    def call(wrapper: inprocess.CallWrapper = None) -> None:  # the wrapper fills it in
        train(directory, wrapper.iteration, fails=True)

    call.__annotations__["wrapper"] = inprocess.CallWrapper  # the wrapper reads the type
    inprocess.Wrapper(store_kwargs={"port": int(os.environ["NVRX_PORT"])})(call)()


if __name__ == "__main__":
    how, place = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if how == "nvrx":
        call_with_nvrx(place)
    elif how == "function":
        call_again(place)
    else:
        train(place, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), fails=how == "torchrun")
