"""Parses DeepSpeed's files: `…_model_states.pt`, and ZeRO's `…_optim_states.pt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from shardwise.parts.formats.reader import FormatError, PickledInstance, StoredArray

STEP = "step"
"""The key of the count of steps in the state of an optimizer."""
Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
"""The shapes of parameters by name."""
Number: TypeAlias = "int | float"
ParameterState: TypeAlias = Mapping[str, "StoredArray | Number"]
"""The state of an optimizer for one parameter or flat group, by key."""
T = TypeVar("T")

CLASSES = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)
"""Classes of DeepSpeed that occur in its pickles."""

DEEPSPEED_KEYS = (
    *("data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "num_experts", "ds_autoep_layers", "autoep_layers"),
    *("universal_checkpoint_info",),
)
"""Keys of `ModelState.values` that DeepSpeed wrote; the others are the user's client state."""
LOSS_SCALING_KEYS = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_MODEL_KEYS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("frozen_param_fragments", "shared_params", "sparse_tensor_module_names"),
)
_MOST_DIMENSIONS, _MOST_ELEMENTS = 64, 2**59

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The contents of a file of model states.

    Attributes:
        path: the path of the file, for messages.
        module: parameters and buffers of the module; None in a pipeline.
        buffers: the names of buffers.
        shapes: shapes of trained parameters, by group, in the order in which they were flattened.
        frozen_shapes: the shapes of frozen parameters.
        frozen: under ZeRO 3, this rank's slices of frozen parameters; otherwise whole frozen
            parameters, which `module` has as well.
        ties: names of tied parameters, and the names that they are tied to.
        optimizer: the state of an optimizer without ZeRO.
        values: the plain values of all other keys.
    """

    path: str
    module: Mapping[str, StoredArray] | None
    buffers: frozenset[str]
    shapes: tuple[Shapes, ...]
    frozen_shapes: Shapes
    frozen: Mapping[str, StoredArray]
    ties: Mapping[str, str]
    optimizer: Mapping[Any, Any] | None
    values: Mapping[str, Any]

    @property
    def arrays(self) -> Mapping[str, StoredArray]:
        """The module's parameters and buffers; none in a pipeline. Under ZeRO 3, buffers only."""
        return self.module or {}

    def find_ties(self) -> dict[str, str]:
        """Return recorded ties, and parameters that have the bytes of an earlier parameter."""
        first_names: dict[StoredArray, str] = {}
        ties = {}
        for name, array in self.arrays.items():
            if math.prod(array.shape) and first_names.setdefault(array, name) != name:
                ties[name] = first_names[array]
        return ties | dict(self.ties)

    def for_rank(self, file: str, path: str) -> ModelState:
        """Return the model states of another rank, whose file contains the same pickle.

        Only the frozen slices are taken from that file; other arrays come from the first rank.

        Args:
            file: the name of the other rank's file.
            path: its path.
        """
        frozen = {name: replace(array, file=file) for name, array in self.frozen.items()}
        return replace(self, path=path, module=None, optimizer=None, frozen=frozen)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of an optimizer in one rank's file.

    ZeRO flattens the parameters of a group into one tensor, a *flat group*. Some optimizers that
    work without ZeRO do the same. The group is a param group, or, under ZeRO 3, a part of a param
    group. ZeRO divides each flat group among ranks.

    Attributes:
        path: the path of the file, for messages.
        states: arrays and plain numbers of each parameter or flat group, by key.
        hyperparameters: the hyperparameters of each param group; None if the file lacks them.
        param_group_of: for each parameter or flat group, the index of its param group.
        masters: the master weights of each parameter or flat group; empty if there are none.
        zero_3: whether parameters are cut into slices (ZeRO 3); else groups are cut into
            partitions.
        partition_counts: for each flat group, the number of ranks that divide it; 0 if the file
            lacks it. Empty if the state is not flat.
        paddings: for each group, elements of padding after each parameter.
        slices: for each group, by parameter, start and length of the rank's slice in elements; None
            if the file lacks them.
        values: the plain values.
        optimizer_type: the name of the optimizer in DeepSpeed's configuration, if any.
    """

    path: str
    states: tuple[ParameterState, ...]
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    param_group_of: tuple[int, ...]
    masters: tuple[StoredArray, ...] = ()
    zero_3: bool = False
    partition_counts: Sequence[int] = ()
    paddings: Sequence[tuple[int, ...]] | None = None
    slices: Sequence[Mapping[str, tuple[int, int]]] | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    optimizer_type: str | None = None


def parse_model_state(value: object, path: str) -> ModelState:
    """Parse a file of model states.

    Raises:
        FormatError: the file is malformed.
    """
    contents = "file of DeepSpeed's model states"
    entries = _convert(value, dict[str, Any], path, contents)
    if not {"module", "buffer_names"} <= entries.keys():
        raise FormatError(
            f"{path}: not a valid {contents}: module or buffer_names is missing; copy the file "
            "again, or save it with a supported version of DeepSpeed"
        )
    ties = entries.get("shared_params")  # a list in old versions
    entry = partial(convert_entry, entries, path)
    module = entry("module", dict[str, Any] | None)
    groups = entry("param_shapes", list[dict[str, Any]] | None)
    frozen_shapes = entry("frozen_param_shapes", dict[str, Any] | None)
    frozen = entry("frozen_param_fragments", dict[str, Any] | None)
    return ModelState(
        path,
        None if module is None else require_arrays(module, f"{path}: module"),
        frozenset(entry("buffer_names", list[str] | None) or ()),
        tuple(_parse_shapes(group, path) for group in groups or ()),
        _parse_shapes(frozen_shapes or {}, path),
        require_arrays(frozen or {}, f"{path}: frozen_param_fragments"),
        entry("shared_params", dict[str, str] | None)
        if isinstance(ties, dict)
        else dict(entry("shared_params", list[tuple[str, str]] | None) or ()),
        entry("optimizer", dict[Any, Any] | None),
        {key: each for key, each in entries.items() if key not in _MODEL_KEYS},
    )


def parse_optimizer_state(value: object, path: str) -> OptimizerState:
    """Parse a file of ZeRO's optimizer states.

    Raises:
        FormatError: the file is malformed.
    """
    file = _convert(value, dict[str, Any], path, "file of ZeRO's optimizer states")
    saved = convert_entry(file, path, "optimizer_state_dict", dict[str, Any])
    if saved.get("ds_zero_partition_groups"):
        raise FormatError(
            f"{path}: experts that AutoEP divides under ZeRO 3 are not supported: convert the "
            "checkpoint with DeepSpeed's ds_to_universal, and open the result"
        )
    zero_3 = "fp32_flat_groups" in saved
    weights_key = "fp32_flat_groups" if zero_3 else "single_partition_of_fp32_groups"
    masters = _parse_masters(convert_entry(saved, path, weights_key, list[Any]), path)
    base_key = "optimizer_state_dict" if zero_3 else "base_optimizer_state"
    base = convert_entry(saved, path, base_key, dict[str, Any] | list[Any])
    if isinstance(base, dict):
        optimizer = parse_torch_optimizer(base, path)
    else:
        step = saved.get("base_optimizer_state_step")
        steps = {} if step is None else {"step": _require_number("step", step, path)}
        states = tuple({**steps, **_flatten_state(each, path)} for each in base)
        optimizer = OptimizerState(path, states, None, tuple(range(len(masters))))
    counts = convert_entry(saved, path, "partition_count", list[Count] | int | None) or 0
    counts = [max(counts, 0)] * len(masters) if isinstance(counts, int) else counts
    _require_count(optimizer.states, masters, "states", path)
    _require_count(counts, masters, "partition counts", path)
    if not zero_3 and optimizer.hyperparameters is not None:
        _require_count(optimizer.hyperparameters, masters, "hyperparameters", path)
    slices = convert_entry(saved, path, "param_slice_mappings", list[dict[str, Any]] | None)
    paddings_key, paddings_type = "param_alignment_paddings", list[tuple[Count, ...]] | None
    config = file.get("ds_config")
    settings = config.get("optimizer") if isinstance(config, Mapping) else None
    name = settings.get("type") if isinstance(settings, Mapping) else None
    return replace(
        optimizer,
        masters=masters,
        zero_3=zero_3,
        partition_counts=counts,
        paddings=convert_entry(saved, path, paddings_key, paddings_type),
        slices=None if slices is None else [_parse_slices(each, path) for each in slices],
        values=select_loss_scaling_values(saved),
        optimizer_type=name if isinstance(name, str) else None,
    )


def parse_undivided_optimizer(state: Mapping[Any, Any], path: str) -> OptimizerState:
    """Parse the state of an optimizer without ZeRO: torch's own, or DeepSpeed's wrapper around it.

    Raises:
        FormatError: the state is malformed.
    """
    optimizer = parse_torch_optimizer(state.get("optimizer_state_dict", state), path)
    is_flat = "fp32_groups_flat" in state
    masters = state.get("fp32_groups_flat" if is_flat else "fp32_groups") or ()
    if not is_flat and isinstance(masters, (list, tuple)):
        masters = [master for group in masters for master in group]
    masters = tuple(master for master in masters if isinstance(master, StoredArray))
    if len(masters) not in (0, len(optimizer.states)):
        raise FormatError(
            f"{path}: the optimizer has {len(masters)} weights and {len(optimizer.states)} "
            "states: the file is damaged, or of an unsupported version of DeepSpeed: copy it "
            "again from an intact source, or save again with a supported version"
        )
    return replace(optimizer, masters=masters, partition_counts=(1,) * len(masters) * is_flat)


def require_arrays(value: object, path: str) -> dict[str, StoredArray]:
    """Return a state dict after checking that all its values are arrays.

    Raises:
        FormatError: it contains anything else, for example a module's extra state.
    """
    arrays = _convert(value, dict[str, Any], path, "state dict of tensors")
    for name, array in arrays.items():
        if not isinstance(array, StoredArray):
            raise FormatError(
                f"{path}: {name[:200]} is not a tensor, but {type(array).__name__}: such extra "
                "states are not supported; save the module without them"
            )
    return arrays


def parse_torch_optimizer(value: object, path: str) -> OptimizerState:
    """Parse the `state_dict` of a torch optimizer.

    Raises:
        FormatError: it is malformed.
    """
    optimizer = _convert(value, dict[str, Any], path, "state of an optimizer")
    state = convert_entry(optimizer, path, "state", dict[int, Any])
    states, hyperparameters, param_groups = [], [], []
    groups = convert_entry(optimizer, path, "param_groups", list[dict[str, Any]])
    for group_index, group in enumerate(groups):
        for index in convert_entry(group, path, "params", list[int]):
            states.append(_flatten_state(state.get(index, {}), path))
            param_groups.append(group_index)
        hyperparameters.append(
            {key: each for key, each in group.items() if key not in ("params", "param_names")}
        )
    return OptimizerState(path, tuple(states), tuple(hyperparameters), tuple(param_groups))


def select_loss_scaling_values(optimizer_state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the loss scaler and gradient clipping of an optimizer state."""
    return {key: optimizer_state[key] for key in LOSS_SCALING_KEYS if key in optimizer_state}


def _parse_masters(arrays: Sequence[object], path: str) -> tuple[StoredArray, ...]:
    masters = []
    for index, array in enumerate(arrays):
        if not isinstance(array, StoredArray) or not array.is_flat:
            raise FormatError(
                f"{path}: the weights of group {index} are not a flat tensor: copy the file again "
                "from an intact source; or, if parameters were offloaded to NVMe, save without "
                "this offload"
            )
        masters.append(array)
    return tuple(masters)


def _flatten_state(value: object, path: str) -> dict[str, StoredArray | Number]:
    """Return the state of one parameter; keys of nested dicts are joined by dots."""
    flattened: dict[str, StoredArray | Number] = {}
    stack = list(_convert(value, dict[str, Any], path, "state of a parameter").items())
    while stack:
        key, item = stack.pop(0)
        if isinstance(item, Mapping):
            stack[:0] = [(f"{key}.{inner_key}", inner) for inner_key, inner in item.items()]
        elif isinstance(item, StoredArray):
            flattened[key] = item
        elif item is not None:
            flattened[key] = _require_number(key, item, path)
    return flattened


def _parse_shapes(shapes: Mapping[str, object], path: str) -> dict[str, Shape]:
    parsed = {}
    for name, shape in shapes.items():
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise FormatError(
                f"{path}: {name[:200]}: {str(shape)[:80]} is not a shape: copy the file again from "
                "an intact source"
            )
        if math.prod(n for n in shape if n) > _MOST_ELEMENTS or len(shape) > _MOST_DIMENSIONS:
            raise FormatError(
                f"{path}: {name[:200]}: the shape {str(shape)[:80]} is too large: the file is "
                "damaged: copy it again from an intact source"
            )
        parsed[name] = tuple(shape)
    return parsed


def _parse_slices(slices: Mapping[str, object], path: str) -> dict[str, tuple[int, int]]:
    parsed = {}
    for name, address in slices.items():
        fields = address.fields if isinstance(address, PickledInstance) else {}
        start, length = fields.get("start"), fields.get("numel")
        if type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise FormatError(
                f"{path}: param_slice_mappings: {name[:200]} has no valid start and numel: copy "
                "the file again from an intact source"
            )
        parsed[name] = (start, length)
    return parsed


def _require_number(key: str, value: object, path: str) -> Number:
    if not isinstance(value, (int, float)):
        raise FormatError(
            f"{path}: {key[:200]} in the state of an optimizer is neither a tensor nor a number, "
            f"but {type(value).__name__}, so this optimizer cannot be read: to read the weights "
            "alone, convert the checkpoint with DeepSpeed's zero_to_fp32.py, and open the result"
        )
    return value


def _require_count(
    items: Sequence[object], masters: Sequence[object], contents: str, path: str
) -> None:
    if len(items) != len(masters):
        raise FormatError(
            f"{path}: it has {contents} of {len(items)} groups, but weights of {len(masters)}: "
            "copy the file again from an intact source, or save with a supported DeepSpeed"
        )


def convert_entry(values: Mapping[Any, Any], path: str, key: str, target_type: Any) -> Any:
    """Return the value of a key, which is None if the key is missing.

    Raises:
        FormatError: the value does not have this type.
    """
    return _convert(values.get(key), target_type, path, f"value of {key}")


def _convert(value: object, target_type: type[T], path: str, contents: str) -> T:
    try:
        return msgspec.convert(value, target_type)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{path}: not a valid {contents}: {error}; copy the file again, or save it with a "
            "supported version of DeepSpeed"
        ) from error
