"""Bind DeepSpeed's engines, which hold weights and counters, and DeepSpeed's optimizers.

The weights that an optimizer steps are flat ranges of parameters (ZeRO 1 to 3). All values are read
from DeepSpeed's objects, without communication. DeepSpeed is not imported: its classes are
recognised by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardwise.kernel.errors import StateError
from shardwise.ports.binding import (
    Binding,
    Context,
    FlatRange,
    JsonValue,
    LocalState,
    Parameter,
    SavedNames,
    Selection,
    TensorLeaf,
    decode,
    encode,
    tensor_leaf,
)
from shardwise.ports.module_binding import (
    Group,
    ModuleBinding,
    OptimizerBinding,
    has_class,
    modules_in,
)

VALUES_KEY = "deepspeed"
MOMENTUM = "momentum_buffer"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
LOSS_SCALER = "loss_scaler"
LOSS_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

NamesById = Mapping[int, str]
"""Names of parameters, by the `id` of the parameter."""


def bind(name: str, value: object, context: Context) -> Binding | None:
    """Return the binding of an engine, or of one of DeepSpeed's optimizers.

    Raises:
        StateError: an engine holds the weights of this module, or the engine or optimizer has a
            feature that is not supported.
    """
    if _is_optimizer(value):
        return DeepSpeedOptimizerBinding(name, value, context)
    modules = modules_in(value)
    engine_class = "deepspeed.runtime.engine", "DeepSpeedEngine"
    if not any(has_class(module, *engine_class) for module in modules):
        for module in modules:
            _refuse_module_of_engine(name, module)
        return None
    problem = "a list has DeepSpeed engines" if len(modules) > 1 else ""
    for each in context.bindings:
        other = getattr(each, "module", each)  # the module of sw.trainable
        if isinstance(other, EngineBinding) and other.prefix == context.prefix:
            problem = f"{other.name} is another DeepSpeed engine in the same dict"
    if problem:
        raise StateError(
            f"{name}: {problem}: put each engine into a separate dict, as in "
            '{"actor": {"model": engine, "optimizer": engine.optimizer}, "critic": {…}}'
        )
    return EngineBinding(name, modules[0], context)


class DeepSpeedOptimizerBinding(OptimizerBinding):
    """One of DeepSpeed's optimizers, which wrap a torch optimizer."""

    is_inside_framework = True

    def __init__(self, name: str, optimizer: Any, context: Context) -> None:
        torch_optimizer = _torch_optimizer_of(optimizer)
        if torch_optimizer is None:
            raise StateError(
                f"{name}: {type(optimizer).__name__} wraps no torch optimizer, so its state cannot "
                "be saved: save with engine.save_checkpoint(); shardwise can open such checkpoints"
            )
        super().__init__(name, [torch_optimizer], context)
        self._optimizer = optimizer

    def parameter_order(self) -> None:
        """Return None: checkpoints of DeepSpeed do not identify parameters by position."""

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set created state, plain state and hyperparameters, and Muon's momenta under ZeRO 3.

        ZeRO 3 can keep them in memory, in tensors that then replace those of the state.
        """
        super().restore(values)
        kept = getattr(self._optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
        for index, momentum in kept.items() if self._is_loaded else ():
            state = self.optimizers[0].state.get(
                self._optimizer.fp32_partitioned_groups_flat[index]
            )
            if state and MOMENTUM in state:
                momentum.copy_(state[MOMENTUM])
                state[MOMENTUM] = momentum
            else:
                momentum.zero_()

    def find_groups(self) -> list[Group]:
        """Return the param groups.

        ZeRO 3 keeps the groups empty, so this method fills, reads, and empties them again.
        """
        fill_groups = getattr(self._optimizer, "_set_fp32_optimizer_param_groups", None)
        if fill_groups is None:
            return super().find_groups()
        fill_groups()
        try:
            return super().find_groups()
        finally:
            self._optimizer._clear_fp32_optimizer_param_groups()


class EngineBinding(ModuleBinding):
    """An engine: its weights, counts of steps and samples, and loss scale.

    Master weights of the optimizer replace the module's weights.

    Args:
        name: the name of the engine.
        engine: the engine.
        context: the state. The names of counters begin with its prefix.

    Raises:
        StateError: the engine has a feature that is not supported.
    """

    has_whole_state_dict = False

    def __init__(self, name: str, engine: Any, context: Context) -> None:
        super().__init__(name, modules_in(engine.module), context)
        _refuse_unsupported_engine(name, engine)
        self.prefix = context.prefix
        self._engine = engine
        self._bindings = context.bindings
        torch_optimizer = _torch_optimizer_of(engine.optimizer)
        self.optimizers = [] if torch_optimizer is None else [torch_optimizer]

    def parameters(self) -> Iterator[Parameter]:
        """Yield parameters that an optimizer may hold: master weights, then the module's own."""
        yield from self._master_weights()
        yield from super().parameters()

    def local_state(self) -> LocalState:
        """Return the module's state, with master weights instead of its parameters, and counters.

        Raises:
            StateError: the state has the torch optimizer in place of the engine's optimizer.
        """
        self._refuse_emptied_optimizer()
        local_state = super().local_state()
        leaves: dict[str, TensorLeaf] = {}
        for master in self._master_weights():
            flat = master.tensor.detach()
            for each in master.flat:
                leaves[each.name] = each.leaf(each.name, flat)
            if not master.flat:
                leaves[master.name] = tensor_leaf(master.name, master.tensor)
        engine_leaves: dict[str, TensorLeaf] = {}
        names, part = self._parameter_names(), self._parts[0]
        for path, parameter in part.module.named_parameters(remove_duplicate=False):
            leaf = leaves.get(names[id(parameter)])
            if leaf is None and hasattr(parameter, "ds_tensor"):  # no optimizer steps it
                own_range = _range_of_zero_3(parameter, path)
                leaf = own_range.leaf(path, parameter.ds_tensor.detach())
            if leaf is not None:
                full_name = part.name(path)
                engine_leaves[full_name] = replace(leaf, name=full_name, tie_key=id(parameter))
        local_state.tensors = [engine_leaves.get(leaf.name, leaf) for leaf in local_state.tensors]
        local_state.objects |= {key: encode(value, key) for key, value in self._counters().items()}
        return local_state

    def all_targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the targets, without the counters that the checkpoint lacks.

        Only checkpoints of engines have counters.
        """
        local_state = super().all_targets(saved, selection)
        for name in self._counters():
            if not saved.has_object(name):
                del local_state.objects[name]
        return local_state

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set extra state, the counters and the loss scale."""
        super().restore(values)
        for name in filter(values.__contains__, self._counters()):
            value = decode(values[name], name)
            key = name.removeprefix(f"{self.prefix}{VALUES_KEY}.")
            if key == LOSS_SCALER:
                _set_loss_scaler(name, _loss_scaler(self._engine.optimizer), value)
            elif isinstance(value, int):
                setattr(self._engine, key, value)
            else:
                raise StateError(
                    f"{name}: expected an integer in the checkpoint, found {value!r}: leave it out "
                    f"with skip=[{name!r}]"
                )

    def rebuild_weights(self) -> None:
        """Compute the module's weights from the master weights. This is a collective."""
        if (functions := _functions_for(self._engine.optimizer)) is not None:
            with torch.no_grad():
                functions[1](self._engine.optimizer)
        super().rebuild_weights()

    def _master_weights(self) -> Iterator[Parameter]:
        if (functions := _functions_for(self._engine.optimizer)) is not None:
            yield from functions[0](self._engine.optimizer, self._parameter_names())

    def _parameter_names(self) -> dict[int, str]:
        parameters = [*super().parameters()]  # a tied parameter has its first name
        return {id(each.tensor): each.name for each in reversed(parameters)}

    def _refuse_emptied_optimizer(self) -> None:
        """Refuse a state with the inner torch optimizer, because ZeRO 3 empties its groups."""
        for other in self._bindings:
            for optimizer in self.optimizers:
                is_inner = type(other) is OptimizerBinding and optimizer in other.optimizers
                if is_inner and not any(group["params"] for group in optimizer.param_groups):
                    raise StateError(
                        f"{other.name}: this optimizer has no parameters, because the DeepSpeed "
                        f"engine {self.name} holds them: put engine.optimizer into the state "
                        "instead"
                    )

    def _counters(self) -> dict[str, object]:
        counters: dict[str, object] = {key: getattr(self._engine, key) for key in COUNTERS}
        scaler = _loss_scaler(self._engine.optimizer)
        if scaler is not None:
            counters[LOSS_SCALER] = {
                key: getattr(scaler, key) for key in LOSS_SCALER_KEYS if hasattr(scaler, key)
            }
        return {f"{self.prefix}{VALUES_KEY}.{key}": value for key, value in counters.items()}


def _is_optimizer(value: object) -> bool:
    """Return whether a value is one of DeepSpeed's optimizers, which wrap a torch optimizer."""
    return has_class(value, "deepspeed.runtime", "DeepSpeedOptimizer")


def _torch_optimizer_of(optimizer: Any) -> Optimizer | None:
    """Return the torch optimizer inside the optimizer of an engine, if any."""
    inner = optimizer.optimizer if _is_optimizer(optimizer) else optimizer
    return inner if isinstance(inner, Optimizer) else None


def _refuse_module_of_engine(name: str, module: nn.Module) -> None:
    """Refuse a module whose weights, or master weights, DeepSpeed divides among ranks.

    Raises:
        StateError: the module must be saved through its engine.
    """
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise StateError(
                f"{name}: a DeepSpeed engine holds the current weights of this module: put the "
                'engine into the state, as in {"model": engine, "optimizer": engine.optimizer}'
            )


def _refuse_unsupported_engine(name: str, engine: Any) -> None:
    """Refuse an engine with features that this module cannot read.

    Raises:
        StateError: names the feature.
    """
    optimizer = engine.optimizer
    is_torch_optimizer = optimizer is None or isinstance(optimizer, Optimizer)
    # Only pipelines have a grid. Their model-parallel size includes the stages.
    grid = getattr(engine, "grid", None)
    sliced = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    parts = [getattr(each, "ds_tensor", None) for each in engine.module.parameters()]
    nvme = ("swap_optimizer", "params_in_nvme_and_cpu")
    features = {
        f"its optimizer {type(optimizer).__name__}": not is_torch_optimizer
        and _functions_for(optimizer) is None,
        "experts": engine.has_moe_layers,
        "tensor parallelism": sliced > 1 or engine.autotp_size() > 1,
        "ZenFlow": getattr(optimizer, "zenflow", False),
        "offloading to NVMe": any(getattr(optimizer, each, False) for each in nvme),
        "offloading the optimizer in part (ratio), which keeps moments in two optimizers,": hasattr(
            optimizer, "backup_optimizer"
        ),
        "quantized weights": any(hasattr(each, "ds_quant_scale") for each in parts),
    }
    unsupported = next((feature for feature, is_used in features.items() if is_used), None)
    if unsupported is None:
        return
    raise StateError(
        f"{name}: {unsupported} is not supported for DeepSpeed engines: save with "
        "engine.save_checkpoint(); shardwise can open such checkpoints"
    )


def _loss_scaler(optimizer: object) -> object | None:
    """Return the loss scaler if the loss scale is dynamic; otherwise None."""
    if not getattr(optimizer, "dynamic_loss_scale", False):
        config = getattr(optimizer, "loss_scale_config", None)
        return config if getattr(config, "dynamic_loss_scale", False) else None
    return getattr(optimizer, "loss_scaler", None)


def _set_loss_scaler(name: str, scaler: object, value: object) -> None:
    if not isinstance(value, Mapping):
        raise StateError(
            f"{name}: expected the state of a loss scaler in the checkpoint, a dict, found "
            f"{value!r}: leave it out with skip=[{name!r}]"
        )
    for key in LOSS_SCALER_KEYS:
        if hasattr(scaler, key) and isinstance(value.get(key), (int, float)):
            setattr(scaler, key, value[key])


def _masters_in_flat_tensors(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    """Yield this rank's master weights of each group as a parameter.

    The parameters of a group lie in one flat tensor. Each rank holds an equal partition of this
    tensor. With FP16_Optimizer, each rank holds the whole tensor.
    """
    kind = type(optimizer).__name__
    flats, groups = (getattr(optimizer, attribute) for attribute in _FLAT_TENSORS[kind])
    # The offsets in elements of each group's parameters, since DeepSpeed 0.19.8.
    offsets = getattr(optimizer, "round_robin_bit16_offsets", None)
    for index, (flat, parameters) in enumerate(zip(flats, groups, strict=True)):
        rank = 0
        if kind != "FP16_Optimizer":
            rank = dist.get_rank(optimizer.real_dp_process_group[index])
        low, high = rank * flat.numel(), (rank + 1) * flat.numel()
        if offsets is None:  # they lie end to end
            starts = accumulate((each.numel() for each in parameters[:-1]), initial=0)
        else:
            starts = offsets[index]
        ranges = [
            FlatRange.whole(names[id(parameter)], parameter.shape, start).cut(low, high)
            for parameter, start in zip(parameters, starts, strict=True)
        ]
        keeps_matrices = kind == "DeepSpeedZeroOptimizer" and not optimizer.cpu_offload
        if keeps_matrices and _is_muon(optimizer) and getattr(parameters[0], "use_muon", False):
            yield MatricesOfMuon(flat, "", tuple(ranges))
        else:
            yield Parameter(flat, "", tuple(ranges))


def _is_muon(optimizer: Any) -> bool:
    return "muon" in type(optimizer.optimizer).__name__.lower()  # as DeepSpeed tells it


class MatricesOfMuon(Parameter):
    """A partition of matrices under ZeRO 1 or 2 and DeepSpeed's Muon, which needs whole matrices.

    If a partition has a part of a matrix, its rank keeps the momentum of the whole matrix. These
    momenta lie one after the other. Offloaded to the CPU, they lie as the partition does.
    """

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """Return the momenta, one leaf for each matrix; and other state as for any parameter."""
        flat = value.detach().view(-1)
        if flat.numel() != self._size:
            raise StateError(
                f"{prefix}.{self.representative_name}.{key}: Muon keeps {flat.numel()} elements for"
                f" matrices of {self._size} elements, so their order is unknown: save with "
                "engine.save_checkpoint(), or use ZeRO 3"
            )
        starts = accumulate((math.prod(each.shape) for each in self._parts), initial=0)
        return [
            FlatRange.whole(each.name, each.shape, start).leaf(f"{prefix}.{each.name}.{key}", flat)
            for each, start in zip(self._parts, starts, strict=False)
        ]

    def allocate_state(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        layout: object = None,
    ) -> torch.Tensor:
        """Allocate the momenta of all matrices of which the partition has a part."""
        return torch.zeros(self._size, dtype=dtype, device=self.tensor.device)

    @property
    def _parts(self) -> list[FlatRange]:
        return [each for each in self.flat if each.boxes]

    @property
    def _size(self) -> int:
        return sum(math.prod(each.shape) for each in self._parts)


def _masters_of_fp16_unfused(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            yield Parameter(master, names[id(parameter)])


def _masters_of_zero_3(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for flat, parameters in groups:
        ranges, start = [], 0
        for parameter in parameters:
            part = _range_of_zero_3(parameter, names[id(parameter)])
            ranges.append(replace(part, start=start))
            start += parameter.ds_tensor.ds_numel
        yield Parameter(flat, "", tuple(ranges))


def _range_of_zero_3(parameter: Any, name: str) -> FlatRange:
    """Return this rank's range of a parameter. Ranges have equal sizes; the last one is padded."""
    slice_size, rank = parameter.ds_tensor.ds_numel, dist.get_rank(parameter.ds_process_group)
    return FlatRange.whole(name, parameter.ds_shape).cut(rank * slice_size, (rank + 1) * slice_size)


def _rebuild_by_gather(optimizer: Any) -> None:
    optimizer.update_lp_params()


def _rebuild_fp16(optimizer: Any) -> None:
    for weight, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
        weight.data.copy_(master.data)


def _rebuild_fp16_unfused(optimizer: Any) -> None:
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)


def _rebuild_zero_3(optimizer: Any) -> None:
    # Free the gathered weights, which are old, and gather the persistent ones again.
    optimizer.checkpoint_event_prologue()
    for group_index in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group_index)
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


_FLAT_TENSORS = {
    "DeepSpeedZeroOptimizer": ("single_partition_of_fp32_groups", "round_robin_bit16_groups"),
    "BF16_Optimizer": ("fp32_groups_flat_partition", "bf16_groups"),
    "FP16_Optimizer": ("fp32_groups_flat", "fp16_groups"),
}
"""The attributes of DeepSpeed's optimizers that hold the flat tensors, and the groups in them."""

_Masters = Callable[[Any, NamesById], Iterator[Parameter]]
_Rebuild = Callable[[Any], None]
_FUNCTIONS: Mapping[str, tuple[_Masters, _Rebuild]] = {
    "DeepSpeedZeroOptimizer": (_masters_in_flat_tensors, _rebuild_by_gather),
    "DeepSpeedZeroOptimizer_Stage3": (_masters_of_zero_3, _rebuild_zero_3),
    "BF16_Optimizer": (_masters_in_flat_tensors, _rebuild_by_gather),
    "FP16_Optimizer": (_masters_in_flat_tensors, _rebuild_fp16),
    "FP16_UnfusedOptimizer": (_masters_of_fp16_unfused, _rebuild_fp16_unfused),
}
"""For each of DeepSpeed's optimizers: a function that yields the weights that it steps, and one
that computes the module's weights from them, which is a collective."""


def _functions_for(optimizer: object) -> tuple[_Masters, _Rebuild] | None:
    return _FUNCTIONS.get(type(optimizer).__name__) if _is_optimizer(optimizer) else None
