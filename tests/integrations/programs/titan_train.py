"""torchtitan's trainer with its debug model, on CPUs: `torchrun … titan_train.py --module …`.

torchtitan supports only accelerators. This program stands in for what the CPU lacks, outside of
checkpoints: memory statistics, attention kernels, and one kind of reduction of gloo.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

MEMORY = ("active_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries", "num_ooms")


def pretend_that_cpus_are_devices() -> None:
    """Give torch.cpu the functions of an accelerator's module."""
    properties = types.SimpleNamespace(total_memory=1 << 34, name="cpu")
    functions: dict[str, Any] = {
        "current_device": lambda: 0,
        "device_count": lambda: 64,
        "empty_cache": lambda *_: None,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: properties,
        "manual_seed": torch.manual_seed,
        "memory_stats": lambda *_: dict.fromkeys(MEMORY, 0),
        "reset_peak_memory_stats": lambda *_: None,
        "set_device": lambda _: None,
        "synchronize": lambda *_: None,
    }
    for name, function in functions.items():
        setattr(torch.cpu, name, function)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: torch.cpu
    barrier = dist.barrier
    dist.barrier = lambda *_, **__: barrier()
    dist.set_timeout = lambda *_, **__: None


def replace_kernels() -> None:
    """Use attention with a backward pass on CPUs, and the reductions of gloo."""
    from torchtitan.models.common import attention

    def attend(q: Any, k: Any, v: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any):
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return output, types.SimpleNamespace(lse=None)

    attention.FlexAttention._compiled_flex_attn = staticmethod(attend)
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_divide_factor(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_divide_factor


def record_losses(path: Path, kill_after: int) -> None:
    """Append the loss of each step to a file; kill this process after a step."""
    from torchtitan.components.metrics import MetricsProcessor

    log = MetricsProcessor.log

    def log_and_record(self: Any, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
        log(self, step, loss, *args, **kwargs)
        if dist.get_rank() == 0:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": float(loss).hex()}) + "\n")

    MetricsProcessor.log = log_and_record
    if kill_after:
        from torchtitan.trainer import Trainer

        train_step = Trainer.train_step

        def train_or_die(self: Any, *args: Any) -> None:
            if self.step > kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
            train_step(self, *args)

        Trainer.train_step = train_or_die


if __name__ == "__main__":
    torch.set_num_threads(1)
    pretend_that_cpus_are_devices()
    replace_kernels()
    record_losses(Path(sys.argv.pop(1)), int(sys.argv.pop(1)))
    from torchtitan.train import main

    main()
