"""The formats of exports. Each has a module here, and an entry in `TARGETS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.parts.convert.plan import ExportContents, ExportFiles
from shardwise.parts.convert.targets.dcp import plan_dcp_files
from shardwise.parts.convert.targets.deepspeed_universal import plan_universal_files
from shardwise.parts.convert.targets.hf import plan_huggingface_files
from shardwise.parts.convert.targets.native import plan_native_files
from shardwise.parts.convert.targets.peft import plan_peft_files
from shardwise.parts.convert.targets.torch_file import plan_torch_file

TARGETS: Mapping[str, Callable[[ExportContents], ExportFiles]] = {
    "native": plan_native_files,
    "hf": plan_huggingface_files,
    "dcp": plan_dcp_files,
    "torch": plan_torch_file,
    "peft": plan_peft_files,
    "deepspeed-universal": plan_universal_files,
}
