"""Ranks and parallelisms for the tests of accelerate and transformers: FSDP2 and ZeRO on CPUs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.conftest import PRELOAD
from tests.tools.gang import Gang

FRAMEWORKS = ("accelerate", "deepspeed", "transformers")
needs_frameworks = pytest.mark.skipif(
    not all(map(find_spec, FRAMEWORKS)),
    reason="frameworks are not installed: pip install '.[frameworks]'",
)


@pytest.fixture(scope="module")
def gang() -> Iterator[Gang]:
    """Two workers that end with the module, because accelerate and DeepSpeed change processes."""
    with Gang(2, preload=PRELOAD) as gang:
        yield gang


def plugins_of(parallelism: str, batch_of_rank: int, layer: str) -> dict[str, Any]:
    """The arguments of `Accelerator` for a parallelism; FSDP shards each `layer` by itself."""
    from accelerate.utils import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
    )

    if parallelism == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            cpu_ram_efficient_loading=False,
        )
        return {"cpu": True, "fsdp_plugin": plugin}
    if parallelism.startswith("zero"):
        prepare_deepspeed()
        config = deepspeed_config(parallelism, batch_of_rank)
        config["gradient_clipping"] = 0.0  # accelerate would select 1.0
        return {"deepspeed_plugin": DeepSpeedPlugin(config)}
    return {"cpu": True}


def prepare_deepspeed() -> None:
    """Select gloo, because accelerate selects no backend for CPUs with DeepSpeed."""
    import deepspeed
    from accelerate.state import PartialState

    # DeepSpeed would compile an extension for communication on CPUs.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", DS_ACCELERATOR="cpu")
    PartialState(backend="gloo")


def deepspeed_config(parallelism: str, batch_of_rank: int) -> dict[str, Any]:
    return {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": batch_of_rank,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": int(parallelism[-1])},
        "zero_allow_untested_optimizer": True,
    }


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

    if "deepspeed" in sys.modules:  # it keeps the process groups of earlier tests
        sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
        importlib.reload(sys.modules["deepspeed.utils.groups"])
    for singleton in (AcceleratorState, GradientState, PartialState):
        singleton._reset_state()
