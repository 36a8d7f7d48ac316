"""The formats that can be written: one line registers one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.convert.chosen import Chosen
from shardwise.convert.dcp import dcp_target
from shardwise.convert.huggingface import huggingface_target
from shardwise.convert.native import native_target
from shardwise.convert.output import Target
from shardwise.convert.torchsave import torch_target
from shardwise.convert.universal import universal_target

TARGETS: Mapping[str, Callable[[Chosen], Target]] = {
    "native": native_target,
    "hf": huggingface_target,
    "dcp": dcp_target,
    "torch": torch_target,
    "deepspeed-universal": universal_target,
}
