"""Bind the models and optimizers of a framework that are built from those of torch.

A framework often wraps torch's modules and optimizers, for example to flatten their parameters. Its
binding derives from the one of torch, and changes what the framework changes; see
`shardwise.parts.frameworks.fsdp1` for a short example.
"""

from __future__ import annotations

from shardwise.kernel.adapters.modules import (
    ModuleBinding,
    Part,
    buffers_of,
    extra_states,
    has_class,
    modules_in,
)
from shardwise.kernel.adapters.optimizer_groups import ELSEWHERE, STEP, Group
from shardwise.kernel.adapters.optimizers import OptimizerBinding
from shardwise.kernel.adapters.values import ObjectBinding
from shardwise.kernel.state.local_state import view_for_numpy
from shardwise.kernel.state.tensors import detach_checked, is_dtensor, is_instance

__all__ = [
    "ELSEWHERE",
    "STEP",
    "Group",
    "ModuleBinding",
    "ObjectBinding",
    "OptimizerBinding",
    "Part",
    "buffers_of",
    "detach_checked",
    "extra_states",
    "has_class",
    "is_dtensor",
    "is_instance",
    "modules_in",
    "view_for_numpy",
]
