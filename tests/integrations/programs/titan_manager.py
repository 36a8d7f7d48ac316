"""Short runs with a checkpoint manager of torchtitan, without its trainer: `titan_manager.py`.

Reads a JSON list of runs from standard input, and prints a JSON list of what each run did. All
runs share one process. A run is a dict with "folder" (of the run), "steps" (of the last step) and,
optionally, "dcp" (use torchtitan's own manager), "adapter" (with the assets of Hugging Face),
"stages" (the layers of each pipeline stage) and "options" of the manager.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import OptimizersContainer, default_adamw

from shardwise.integrations.torchtitan import ShardwiseCheckpointManager


class Counter:
    """The state of the trainer, or of the data loader."""

    def __init__(self, key: str) -> None:
        self.key, self.count = key, 0

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.count, "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state[self.key]


class Adapter:
    """Names of Hugging Face for the tiny model."""

    fqn_to_index_mapping = None

    def __init__(self, hf_assets_path: str | None) -> None:
        self.hf_assets_path = hf_assets_path

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"hf.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("hf."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool) -> Any:
        return dist.checkpoint.HuggingFaceStorageReader(path)


def run(each: dict[str, Any]) -> dict[str, Any]:
    """Return what a run loaded, the steps that it saved, its files, and its error."""
    torch.manual_seed(0)
    stages = [
        nn.ModuleDict({str(layer): nn.Linear(4, 4) for layer in layers})
        for layers in each.get("stages", [[0, 1, 2, 3]])
    ]
    config = default_adamw()
    config.implementation = "for-loop"
    optimizers = OptimizersContainer(config, model_parts=stages)
    schedulers = LRSchedulersContainer(optimizers, lambda step: 1 / (step + 1))
    trainer, loader = Counter("step"), Counter("dp_rank_0")
    done: dict[str, Any] = {}
    manager: Any = None
    options = {"enable": True, "interval": 2, "last_save_model_only": False}
    try:
        kind = CheckpointManager if each.get("dcp") else ShardwiseCheckpointManager
        options |= {"async_mode": "disabled", **each.get("options", {})}
        settings = kind.Config(**options)
        manager = kind(
            settings,
            dataloader=loader,
            model_parts=stages,
            optimizers=optimizers,
            lr_schedulers=schedulers,
            states={"train_state": trainer},
            sd_adapter=Adapter(each["adapter"] or None) if "adapter" in each else None,
            base_folder=each["folder"],
        )
        done["loaded"] = manager.load(settings.load_step)
        done |= {"step": trainer.count, "batches": loader.count, "start": fingerprint(stages)}
        if settings.create_seed_checkpoint:
            manager.save(0, last_step=True)
        done["saved"] = []
        while trainer.count < each["steps"]:
            trainer.count += 1
            loader.count += 1
            data = torch.rand(3, 4, generator=torch.Generator().manual_seed(trainer.count))
            for stage in stages:
                for layer in stage.values():
                    data = layer(data)
            data.square().sum().backward()
            manager.maybe_wait_for_staging()
            optimizers.step()
            schedulers.step()
            optimizers.zero_grad()
            if manager.save(trainer.count, last_step=trainer.count == each["steps"]):
                done["saved"].append(trainer.count)
        manager.maybe_wait_for_saving()
        done["end"] = fingerprint(stages)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        done["error"] = "\n".join([f"{type(error).__name__}: {error}", *notes])
    finally:
        if manager is not None:
            manager.close()
    place = Path(each["folder"], "checkpoint")
    done["files"] = sorted(path.name for path in place.iterdir()) if place.is_dir() else []
    return done


def fingerprint(stages: list[nn.ModuleDict]) -> list[str]:
    parameters = [each for stage in stages for each in stage.parameters()]
    return [float(each.detach().double().sum()).hex() for each in parameters]


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    store = dist.TCPStore("localhost", 0, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    results = [run(each) for each in json.load(sys.stdin)]
    dist.destroy_process_group()
    print(json.dumps(results))
