"""The formats that can be written: one module, and one line here, for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.convert.plan import Chosen, Target
from shardwise.convert.targets.dcp import dcp_target
from shardwise.convert.targets.hf import huggingface_target
from shardwise.convert.targets.native import native_target
from shardwise.convert.targets.torch_file import torch_target
from shardwise.convert.targets.universal import universal_target

TARGETS: Mapping[str, Callable[[Chosen], Target]] = {
    "native": native_target,
    "hf": huggingface_target,
    "dcp": dcp_target,
    "torch": torch_target,
    "deepspeed-universal": universal_target,
}
