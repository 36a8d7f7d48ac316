"""What the parts of shardwise plug into its ports, in the form of entry points.

The kernel imports no part. It finds parts here as it finds those of other packages: by the name of
a group, and the name of an entry there. It imports a part when it first needs it.
"""

from __future__ import annotations

from collections.abc import Mapping

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    # Which part binds the types of a module of Python; tried in this order.
    "shardwise.bindings": {
        "shardwise.parts.frameworks.trainable": "shardwise.parts.frameworks.trainable:bind",
        "deepspeed": "shardwise.parts.frameworks.deepspeed:bind",
        "megatron": "shardwise.parts.frameworks.megatron:bind",
        "torch.distributed.fsdp": "shardwise.parts.frameworks.fsdp1:bind",
    },
    # Which part knows the tensor classes of a package; see `tensor_classes.py`.
    "shardwise.tensor_classes": {
        "torchao": "shardwise.parts.tensor_classes.torchao:rule",
        "torch": "shardwise.parts.tensor_classes.layouts:rule",
    },
    # Saves and loads tensors that wrap others.
    "shardwise.composites": {
        "encode": "shardwise.parts.tensor_classes.composite:encode_composite",
        "decode": "shardwise.parts.tensor_classes.composite:decode_composite",
        "empty_like": "shardwise.parts.tensor_classes.composite:empty_like",
        "state_of_tensor": "shardwise.parts.tensor_classes.states:state_of_tensor",
        "fit_to_checkpoint": "shardwise.parts.tensor_classes.states:fit_to_checkpoint",
        "state_of_parameter": "shardwise.parts.tensor_classes.states:state_of_parameter",
        "leave_out_empty": "shardwise.parts.tensor_classes.states:leave_out_empty",
        "state_to_build": "shardwise.parts.tensor_classes.states:StateToBuild",
    },
    # Which part knows the layers of a module of Python whose state dicts lack something.
    "shardwise.layers": {
        "bitsandbytes": "shardwise.parts.frameworks.bitsandbytes:find_layers",
    },
    "shardwise.stores": {
        "remote": "shardwise.parts.stores.remote:open_remote",
        "mirrored": "shardwise.parts.tiers.record:open_with_mirror",
    },
    "shardwise.groups": {
        "torch.distributed": "shardwise.parts.ranks.process_groups:connect_process_group",
    },
    "shardwise.foreign": {
        "specification": "shardwise.parts.formats.specification:Specification",
        "formats_at": "shardwise.parts.formats.opening:formats_at",
        "find_directory": "shardwise.parts.formats.steps:find_directory",
        "step_in_path": "shardwise.parts.formats.steps:step_in_path",
        "read_layout": "shardwise.parts.formats.opening:read_layout",
        "check_layout": "shardwise.parts.formats.opening:check_layout",
        "checksums_of": "shardwise.parts.formats.file_tree:checksums_of",
    },
    "shardwise.checks": {
        "find_damage": "shardwise.parts.checks.verify:find_damage",
        "refuse_damage": "shardwise.parts.checks.verify:refuse_damage",
        "compare": "shardwise.parts.checks.compare:compare",
        "replicas": "shardwise.parts.checks.replica_check:refuse_differing_replicas",
        "names": "shardwise.parts.checks.rename_hints:suggest",
    },
    "shardwise.quantized": {
        "find": "shardwise.parts.quantized.pairs:StoredQuantized",
        "dequantize": "shardwise.parts.quantized.dequantized:Dequantized",
    },
    "shardwise.resizing": {
        "resize": "shardwise.parts.resizing:Resizing.from_patterns",
    },
    "shardwise.read_strategies": {
        "read_once": "shardwise.parts.sharing.strategy:read_together",
    },
}
"""Objects (`module:name`) by group and name."""
