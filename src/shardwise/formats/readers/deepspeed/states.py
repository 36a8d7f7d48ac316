"""The contents of DeepSpeed's files, checked: model states, and optimizer states of ZeRO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Record, Stubs, records
from shardwise.formats.foreign import StoredArray
from shardwise.manifest.manifest import LARGEST

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]
Number: TypeAlias = "int | float"

STUBS: Stubs = records(
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
)
"""Classes of DeepSpeed that occur in its pickles."""

OF_THE_MODEL = (
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("frozen_param_fragments", "shared_params", "sparse_tensor_module_names"),
)
OF_DEEPSPEED = (
    *("data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config"),
    *("ds_version", "num_experts", "ds_autoep_layers", "autoep_layers"),
    *("universal_checkpoint_info",),
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A file of model states.

    Attributes:
        module: parameters and buffers of the module; None in a pipeline.
        shapes: shapes of trained parameters, by group, in the order in which they were flattened.
        shared: names of tied parameters, and the names that they are tied to.
        optimizer: the state of an optimizer without ZeRO.
        rest: all other keys.
    """

    where: str
    module: Mapping[str, StoredArray] | None
    buffers: frozenset[str]
    shapes: tuple[Shapes, ...]
    frozen_shapes: Shapes
    frozen: Mapping[str, StoredArray]
    shared: Mapping[str, str]
    optimizer: Mapping[Any, Any] | None
    rest: Mapping[str, Any]

    def in_file(self, number: int, where: str) -> ModelState:
        """Return the state of another rank, whose file has the same pickle.

        Its frozen slices lie in its own file; other arrays are only taken from the first rank.
        """
        frozen = {
            name: StoredArray(number, a.start, a.dtype, a.shape, a.stride)
            for name, a in self.frozen.items()
        }
        return replace(self, where=where, module=None, optimizer=None, frozen=frozen)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """A file of optimizer states: one rank's part of each group (of each sub-group, in ZeRO 3).

    Attributes:
        sliced: whether ZeRO 3 cut parameters into slices; else groups are cut into partitions.
        masters: the flat weights of each group.
        states: flat arrays and plain numbers of each group, by key.
        settings: hyperparameters; None where they are not stored.
        groups: for each group, the index of its settings.
        counts: for each group, the number of ranks that divide it; 0 if it is not stored.
        paddings: for each group, elements of padding after each parameter.
        slices: for each group, by parameter, start and length of the rank's slice; None if it is
            not stored.
        rest: the plain values.
        kind: the name of the optimizer in DeepSpeed's configuration, if any.
    """

    where: str
    sliced: bool
    masters: tuple[StoredArray, ...]
    states: tuple[Mapping[str, StoredArray | Number], ...]
    settings: tuple[Mapping[str, Any], ...] | None
    groups: tuple[int, ...]
    counts: tuple[int, ...]
    paddings: tuple[tuple[int, ...], ...] | None = None
    slices: tuple[Mapping[str, tuple[int, int]], ...] | None = None
    rest: Mapping[str, Any]
    kind: str | None = None


def model_state(value: object, where: str) -> ModelState:
    """Parse a file of model states.

    Raises:
        FormatError: the file is malformed.
    """
    held = _dict(value, where)
    if "module" not in held or "buffer_names" not in held:
        raise FormatError(f"{where}: not a file of DeepSpeed's model states")
    module = held["module"]
    optimizer = held.get("optimizer")
    buffers = held["buffer_names"] or ()
    if not isinstance(buffers, (list, tuple)) or not all(isinstance(n, str) for n in buffers):
        raise FormatError(f"{where}: buffer_names is not a list of names")
    rest = {key: item for key, item in held.items() if key not in OF_THE_MODEL}
    return ModelState(
        where,
        None if module is None else arrays_of(module, f"{where}: module"),
        frozenset(buffers),
        tuple(_shapes(group, where) for group in _list(held.get("param_shapes") or (), where)),
        _shapes(held.get("frozen_param_shapes") or {}, where),
        arrays_of(held.get("frozen_param_fragments") or {}, f"{where}: frozen_param_fragments"),
        _texts(held.get("shared_params") or {}, where),
        None if optimizer is None else _dict(optimizer, where),
        rest,
    )


def optimizer_state(value: object, where: str) -> OptimizerState:
    """Parse a file of optimizer states.

    Raises:
        FormatError: the file is malformed.
    """
    outer = _dict(value, where)
    if not isinstance(outer.get("optimizer_state_dict"), Mapping):
        raise FormatError(f"{where}: not a file of ZeRO's optimizer states")
    held = outer["optimizer_state_dict"]
    config = outer.get("ds_config")
    said = config.get("optimizer") if isinstance(config, Mapping) else None
    kind = said.get("type") if isinstance(said, Mapping) else None
    read = _of_zero_3 if "fp32_flat_groups" in held else _of_zero_1_and_2
    return read(held, where, kind if isinstance(kind, str) else None)


def arrays_of(value: object, where: str) -> dict[str, StoredArray]:
    """Return a state dict of arrays.

    Raises:
        FormatError: it holds anything else, such as a module's extra state.
    """
    arrays = {}
    for name, array in _dict(value, where).items():
        if not isinstance(array, StoredArray):
            raise FormatError(f"{where}: {str(name)[:200]} is not a tensor")
        arrays[name] = array
    return arrays


def _of_zero_1_and_2(held: Mapping[Any, Any], where: str, kind: str | None) -> OptimizerState:
    masters = _masters(held.get("single_partition_of_fp32_groups"), where)
    base = held.get("base_optimizer_state")
    settings: tuple[Mapping[str, Any], ...] | None = None
    if isinstance(base, Mapping):
        states, settings, _ = of_torch(base, where)
    else:
        states = tuple(_state(each, where) for each in _list(base, where))
        step = held.get("base_optimizer_state_step")
        if step is not None:
            states = tuple({"step": _number(step, where), **state} for state in states)
    counts = _counts(held.get("partition_count") or [0] * len(masters), where)
    paddings = held.get("param_alignment_paddings")
    slices = held.get("param_slice_mappings")
    if paddings is not None:
        paddings = tuple(_counts(each, where) for each in _list(paddings, where))
    if slices is not None:
        slices = tuple(_slices(each, where) for each in _list(slices, where))
    return OptimizerState(
        where=where,
        kind=kind,
        sliced=False,
        masters=masters,
        states=_as_many(states, masters, where),
        settings=None if settings is None else _as_many(settings, masters, where),
        groups=tuple(range(len(masters))),
        counts=_as_many(counts, masters, where),
        paddings=paddings,
        slices=slices,
        rest=of_the_optimizer(held),
    )


def _of_zero_3(held: Mapping[Any, Any], where: str, kind: str | None) -> OptimizerState:
    if held.get("ds_zero_partition_groups"):
        raise FormatError(
            f"{where}: experts that AutoEP divides under ZeRO 3 are not supported: convert the "
            "checkpoint with DeepSpeed's ds_to_universal, and open the result"
        )
    masters = _masters(held.get("fp32_flat_groups"), where)
    states, settings, groups = of_torch(_dict(held.get("optimizer_state_dict"), where), where)
    count = held.get("partition_count")
    return OptimizerState(
        where=where,
        kind=kind,
        sliced=True,
        masters=masters,
        states=_as_many(states, masters, where),
        settings=settings,
        groups=_as_many(groups, masters, where),
        counts=(count if type(count) is int and count > 0 else 0,) * len(masters),
        rest=of_the_optimizer(held),
    )


def of_torch(
    held: Mapping[Any, Any], where: str
) -> tuple[
    tuple[Mapping[str, StoredArray | Number], ...], tuple[Mapping[str, Any], ...], tuple[int, ...]
]:
    """Parse an optimizer's state_dict: state and group of each parameter, settings of each group.

    Raises:
        FormatError: it is malformed.
    """
    states, settings, groups = [], [], []
    by_number = _dict(held.get("state"), where, of=int)
    for index, group in enumerate(_list(held.get("param_groups"), where)):
        group = _dict(group, where)
        for number in _list(group.get("params"), where):
            if type(number) is not int:
                raise FormatError(f"{where}: the optimizer does not number its parameters")
            states.append(_state(by_number.get(number, {}), where))
            groups.append(index)
        settings.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
    return tuple(states), tuple(settings), tuple(groups)


def of_the_optimizer(held: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the plain values of an optimizer state."""
    kept = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
    return {key: held[key] for key in kept if key in held}


def _masters(value: object, where: str) -> tuple[StoredArray, ...]:
    arrays = _list(value, where)
    for array in arrays:
        if not isinstance(array, StoredArray) or len(array.shape) != 1 or array.stride != (1,):
            raise FormatError(
                f"{where}: the weights are not flat tensors (parameters that were offloaded to "
                "NVMe are in separate files, which are not supported)"
            )
    return tuple(arrays)


def _state(value: object, where: str) -> dict[str, StoredArray | Number]:
    """Return the state of one parameter; keys of nested dicts are joined by dots."""
    found: dict[str, StoredArray | Number] = {}
    stack = list(_dict(value, where).items())
    while stack:
        key, item = stack.pop(0)
        if isinstance(item, Mapping):
            stack[:0] = [(f"{key}.{k}", v) for k, v in item.items()]
        elif item is not None:
            found[str(key)] = item if isinstance(item, StoredArray) else _number(item, where)
    return found


def _shapes(value: object, where: str) -> dict[str, Shape]:
    shapes = {}
    for name, shape in _dict(value, where).items():
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise FormatError(f"{where}: {str(name)[:200]}: invalid shape")
        if math.prod(n for n in shape if n) > LARGEST // 8 or len(shape) > 64:
            raise FormatError(f"{where}: {str(name)[:200]}: absurd shape")
        shapes[name] = tuple(shape)
    return shapes


def _texts(value: object, where: str) -> dict[str, str]:
    if isinstance(value, (list, tuple)):  # written by older versions
        value = {pair[0]: pair[1] for pair in value if len(_list(pair, where)) == 2}
    texts = _dict(value, where)
    if not all(isinstance(text, str) for text in texts.values()):
        raise FormatError(f"{where}: shared_params is not a dict of names")
    return texts


def _slices(value: object, where: str) -> dict[str, tuple[int, int]]:
    slices = {}
    for name, address in _dict(value, where).items():
        fields = address.fields if isinstance(address, Record) else {}
        start, numel = fields.get("start"), fields.get("numel")
        if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
            raise FormatError(f"{where}: param_slice_mappings are malformed")
        slices[name] = (start, numel)
    return slices


def _counts(value: object, where: str) -> tuple[int, ...]:
    counts = _list(value, where)
    if not all(type(n) is int and 0 <= n < 2**40 for n in counts):
        raise FormatError(f"{where}: partition_count or param_alignment_paddings: invalid counts")
    return tuple(counts)


def _number(value: object, where: str) -> Number:
    if not isinstance(value, (int, float)):
        raise FormatError(f"{where}: the state of an optimizer is neither a tensor nor a number")
    return value


def _as_many(items: Sequence[Any], masters: Sequence[Any], where: str) -> tuple[Any, ...]:
    if len(items) != len(masters):
        raise FormatError(f"{where}: {len(items)} groups of state, but {len(masters)} of weights")
    return tuple(items)


def _dict(value: object, where: str, of: type = str) -> dict[Any, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, of) for key in value):
        raise FormatError(f"{where}: malformed: a dict is expected, not {type(value).__name__}")
    return dict(value)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise FormatError(f"{where}: malformed: a list is expected, not {type(value).__name__}")
    return list(value)
