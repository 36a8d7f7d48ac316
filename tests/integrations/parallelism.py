"""Accelerators for the tests: FSDP2 of accelerate, on CPUs."""

from __future__ import annotations

from typing import Any


def plugins_of(parallelism: str, layer: str) -> dict[str, Any]:
    """The arguments of `Accelerator` for a parallelism; FSDP shards each `layer` by itself."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    if parallelism == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            cpu_ram_efficient_loading=False,
        )
        return {"cpu": True, "fsdp_plugin": plugin}
    return {"cpu": True}


def select_fsdp(accelerator: Any, plugin: Any) -> None:
    """Select FSDP: accelerate itself ignores the plugin on CPUs, although its code runs there."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def reset_accelerate() -> None:
    """Forget the accelerators of earlier tests in this process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for singleton in (AcceleratorState, GradientState, PartialState):
        singleton._reset_state()
