"""Parses DeepSpeed's files: `…_model_states.pt`, and ZeRO's `…_optim_states.pt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import PickledInstance, allow_as_instances
from shardwise.formats.foreign import StoredArray
from shardwise.manifest.manifest import LARGEST_INTEGER

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
"""The shapes of parameters by name."""
Number: TypeAlias = "int | float"
ParameterState: TypeAlias = Mapping[str, "StoredArray | Number"]
"""The state of an optimizer for one parameter or flat group, by key."""
T = TypeVar("T")

DEEPSPEED_NAMES = allow_as_instances(
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
_MODEL_KEYS = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("frozen_param_fragments", "shared_params", "sparse_tensor_module_names"),
)
_MOST_DIMENSIONS = 64

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


@dataclass(frozen=True, slots=True)
class ModelState:
    """The contents of a file of model states.

    Attributes:
        path: the path of the file, for messages.
        module: parameters and buffers of the module; None in a pipeline.
        buffers: the names of buffers.
        shapes: shapes of trained parameters, by group, in the order in which they were flattened.
        frozen_shapes: the shapes of frozen parameters.
        frozen: under ZeRO 3, this rank's slices of frozen parameters; else second copies of them.
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

    def for_rank(self, file: str, path: str) -> ModelState:
        """Return the model states of another rank, whose file contains the same pickle.

        Only the frozen slices are taken from that file; other arrays come from the first rank.

        Args:
            file: the name of the other rank's file.
            path: its path.
        """
        frozen = {name: replace(array, file=file) for name, array in self.frozen.items()}
        return replace(self, path=path, module=None, optimizer=None, frozen=frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """The contents of a file of optimizer states: one rank's part of each flat group.

    A flat group contains parameters that ZeRO flattened together: a param group, or under ZeRO 3 a
    sub-group of one.

    Attributes:
        path: the path of the file, for messages.
        zero_3: whether parameters are cut into slices (ZeRO 3); else groups are cut into
            partitions.
        masters: the flat master weights of each group.
        states: flat arrays and plain numbers of each group, by key.
        hyperparameters: the hyperparameters of each param group; None if the file lacks them.
        param_groups: for each flat group, the index of its param group.
        partition_counts: for each group, the number of ranks that divide it; 0 if the file lacks
            it.
        paddings: for each group, elements of padding after each parameter.
        slices: for each group, by parameter, start and length of the rank's slice in elements; None
            if the file lacks them.
        values: the plain values.
        optimizer_type: the name of the optimizer in DeepSpeed's configuration, if any.
    """

    path: str
    zero_3: bool
    masters: tuple[StoredArray, ...]
    states: tuple[ParameterState, ...]
    hyperparameters: tuple[Mapping[str, Any], ...] | None
    param_groups: tuple[int, ...]
    partition_counts: tuple[int, ...]
    paddings: Sequence[tuple[int, ...]] | None = None
    slices: Sequence[Mapping[str, tuple[int, int]]] | None = None
    values: Mapping[str, Any]
    optimizer_type: str | None = None


@dataclass(frozen=True, slots=True)
class TorchOptimizer:
    """A `state_dict` of a torch optimizer.

    Attributes:
        states: the state of each parameter.
        hyperparameters: the hyperparameters of each param group.
        param_groups: for each parameter, the index of its param group.
    """

    states: tuple[ParameterState, ...]
    hyperparameters: tuple[Mapping[str, Any], ...]
    param_groups: tuple[int, ...]


@prepare_decoding
class _ModelFile(msgspec.Struct):
    module: dict[str, Any] | None
    buffer_names: list[str] | None
    param_shapes: list[dict[str, Any]] | None = None
    frozen_param_shapes: dict[str, Any] | None = None
    frozen_param_fragments: dict[str, Any] | None = None
    shared_params: dict[str, str] | list[tuple[str, str]] | None = None  # a list in old versions
    optimizer: dict[Any, Any] | None = None


@prepare_decoding
class _OptimizerFile(msgspec.Struct):
    optimizer_state_dict: dict[str, Any]


@prepare_decoding
class _Zero12State(msgspec.Struct):
    single_partition_of_fp32_groups: list[Any]
    base_optimizer_state: dict[str, Any] | list[Any]
    base_optimizer_state_step: Any = None
    partition_count: list[_Count] | None = None
    param_alignment_paddings: list[tuple[_Count, ...]] | None = None
    param_slice_mappings: list[dict[str, Any]] | None = None


@prepare_decoding
class _Zero3State(msgspec.Struct):
    fp32_flat_groups: list[Any]
    optimizer_state_dict: dict[str, Any]
    partition_count: Any = None


@prepare_decoding
class _TorchOptimizerFile(msgspec.Struct):
    state: dict[int, Any]
    param_groups: list[dict[str, Any]]


@prepare_decoding
class _ParamGroup(msgspec.Struct):
    params: list[int]


def parse_model_state(value: object, path: str) -> ModelState:
    """Parse a file of model states.

    Raises:
        FormatError: the file is malformed.
    """
    entries = _convert(value, dict[str, Any], path, "file of DeepSpeed's model states")
    file = _convert(entries, _ModelFile, path, "file of DeepSpeed's model states")
    return ModelState(
        path,
        None if file.module is None else require_arrays(file.module, f"{path}: module"),
        frozenset(file.buffer_names or ()),
        tuple(_parse_shapes(group, path) for group in file.param_shapes or ()),
        _parse_shapes(file.frozen_param_shapes or {}, path),
        require_arrays(file.frozen_param_fragments or {}, f"{path}: frozen_param_fragments"),
        dict(file.shared_params or {}),
        file.optimizer,
        {key: entry for key, entry in entries.items() if key not in _MODEL_KEYS},
    )


def parse_optimizer_state(value: object, path: str) -> OptimizerState:
    """Parse a file of optimizer states.

    Raises:
        FormatError: the file is malformed.
    """
    file = _convert(value, _OptimizerFile, path, "file of ZeRO's optimizer states")
    config = value.get("ds_config") if isinstance(value, Mapping) else None
    optimizer = config.get("optimizer") if isinstance(config, Mapping) else None
    name = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    parse = _parse_zero_3 if "fp32_flat_groups" in file.optimizer_state_dict else _parse_zero_1_2
    return parse(file.optimizer_state_dict, path, name if isinstance(name, str) else None)


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


def _parse_zero_1_2(
    value: Mapping[str, Any], path: str, optimizer_type: str | None
) -> OptimizerState:
    state = _convert(value, _Zero12State, path, "optimizer state of ZeRO 1 or 2")
    masters = _parse_masters(state.single_partition_of_fp32_groups, path)
    base = state.base_optimizer_state
    hyperparameters: tuple[Mapping[str, Any], ...] | None = None
    states: tuple[ParameterState, ...]
    if isinstance(base, dict):
        optimizer = parse_torch_optimizer(base, path)
        states = optimizer.states
        hyperparameters = _require_count(
            optimizer.hyperparameters, masters, "hyperparameters", path
        )
    else:
        states = tuple(_flatten_state(each, path) for each in base)
        if (step := state.base_optimizer_state_step) is not None:
            states = tuple({"step": _require_number("step", step, path), **each} for each in states)
    slices = state.param_slice_mappings
    return OptimizerState(
        path=path,
        optimizer_type=optimizer_type,
        zero_3=False,
        masters=masters,
        states=_require_count(states, masters, "states", path),
        hyperparameters=hyperparameters,
        param_groups=tuple(range(len(masters))),
        partition_counts=_require_count(
            state.partition_count or [0] * len(masters), masters, "partition counts", path
        ),
        paddings=state.param_alignment_paddings,
        slices=None if slices is None else [_parse_slices(each, path) for each in slices],
        values=select_loss_scaling_values(value),
    )


def _parse_zero_3(
    value: Mapping[str, Any], path: str, optimizer_type: str | None
) -> OptimizerState:
    if value.get("ds_zero_partition_groups"):
        raise FormatError(
            f"{path}: experts that AutoEP divides under ZeRO 3 are not supported: convert the "
            "checkpoint with DeepSpeed's ds_to_universal, and open the result"
        )
    state = _convert(value, _Zero3State, path, "optimizer state of ZeRO 3")
    masters = _parse_masters(state.fp32_flat_groups, path)
    optimizer = parse_torch_optimizer(state.optimizer_state_dict, path)
    count = state.partition_count
    return OptimizerState(
        path=path,
        optimizer_type=optimizer_type,
        zero_3=True,
        masters=masters,
        states=_require_count(optimizer.states, masters, "states", path),
        hyperparameters=optimizer.hyperparameters,
        param_groups=optimizer.param_groups,
        partition_counts=(count if type(count) is int and count > 0 else 0,) * len(masters),
        values=select_loss_scaling_values(value),
    )


def parse_torch_optimizer(value: object, path: str) -> TorchOptimizer:
    """Parse an optimizer's `state_dict`.

    Raises:
        FormatError: it is malformed.
    """
    optimizer = _convert(value, _TorchOptimizerFile, path, "state of an optimizer")
    states, hyperparameters, param_groups = [], [], []
    for group_index, group in enumerate(optimizer.param_groups):
        for index in _convert(group, _ParamGroup, path, "param group of an optimizer").params:
            states.append(_flatten_state(optimizer.state.get(index, {}), path))
            param_groups.append(group_index)
        hyperparameters.append(
            {key: each for key, each in group.items() if key not in ("params", "param_names")}
        )
    return TorchOptimizer(tuple(states), tuple(hyperparameters), tuple(param_groups))


def select_loss_scaling_values(optimizer_state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the loss scaler and gradient clipping of an optimizer state."""
    keys = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: optimizer_state[key] for key in keys if key in optimizer_state}


def _parse_masters(arrays: Sequence[object], path: str) -> tuple[StoredArray, ...]:
    masters = []
    for index, array in enumerate(arrays):
        if not isinstance(array, StoredArray) or len(array.shape) != 1 or array.stride != (1,):
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
        if math.prod(n for n in shape if n) > LARGEST_INTEGER // 8 or len(shape) > _MOST_DIMENSIONS:
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
            f"but {type(value).__name__}: save with an optimizer of torch or DeepSpeed"
        )
    return value


def _require_count(
    items: Sequence[T], masters: Sequence[object], contents: str, path: str
) -> tuple[T, ...]:
    if len(items) != len(masters):
        raise FormatError(
            f"{path}: it has {contents} of {len(items)} groups, but weights of {len(masters)}: "
            "copy the file again from an intact source, or save with a supported DeepSpeed"
        )
    return tuple(items)


def _convert(value: object, target_type: type[T], path: str, contents: str) -> T:
    try:
        return msgspec.convert(value, target_type)
    except msgspec.ValidationError as error:
        raise FormatError(
            f"{path}: not a valid {contents}: {error}; copy the file again, or save it with a "
            "supported version of DeepSpeed"
        ) from error
