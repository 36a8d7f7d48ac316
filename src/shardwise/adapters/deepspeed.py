"""Bind DeepSpeed's engines: their weights and counters.

DeepSpeed is not imported: its classes are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.deepspeed_optimizer import (
    adapter_of,
    is_deepspeed_optimizer,
    leaf_of_frozen_parameter,
)
from shardwise.adapters.modules import ModuleContents, ModuleWeights
from shardwise.adapters.parameters import NameCleaner, Parameter
from shardwise.adapters.tensors import tensor_leaf
from shardwise.errors import StateError
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.plain_values import JsonValue, decode, encode
from shardwise.state.selection import Selection

VALUES_KEY = "deepspeed"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
LOSS_SCALER = "loss_scaler"
LOSS_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def is_deepspeed_engine(value: object) -> bool:
    """Return whether a value is an engine of DeepSpeed."""
    return any(
        (cls.__module__, cls.__name__) == ("deepspeed.runtime.engine", "DeepSpeedEngine")
        for cls in type(value).__mro__
    )


def torch_optimizer_of(value: object) -> Optimizer | None:
    """Return the torch optimizer inside an engine or one of DeepSpeed's optimizers, if any."""
    optimizer: Any = value.optimizer if is_deepspeed_engine(value) else value  # type: ignore[attr-defined]
    inner = optimizer.optimizer if is_deepspeed_optimizer(optimizer) else optimizer
    return inner if isinstance(inner, Optimizer) else None


def require_torch_optimizer(name: str, optimizer: object) -> Optimizer:
    """Return the torch optimizer inside one of DeepSpeed's optimizers.

    Raises:
        StateError: the optimizer wraps no torch optimizer.
    """
    inner = torch_optimizer_of(optimizer)
    if inner is None:
        raise StateError(
            f"{name}: {type(optimizer).__name__} wraps no torch optimizer, so its state cannot be "
            "saved: save with engine.save_checkpoint(); shardwise can open such checkpoints"
        )
    return inner


def refuse_module_of_engine(name: str, module: nn.Module) -> None:
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


class EngineWeights(ModuleWeights):
    """The weights of an engine. Master weights of the optimizer replace the module's weights.

    Raises:
        StateError: the engine has a feature that is not supported.
    """

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__([engine.module])
        _refuse_unsupported_engine(name, engine)
        self._engine = engine
        self._module: nn.Module = engine.module

    def parameters(self) -> Iterator[Parameter]:
        """Yield parameters that an optimizer may hold: master weights, then the module's own."""
        yield from self._master_weights()
        yield from super().parameters()

    def owns_optimizer(self, optimizer: Optimizer) -> bool:
        """Return whether this is the engine's optimizer."""
        return torch_optimizer_of(self._engine) is optimizer

    def contents(self, module_name: str) -> ModuleContents:
        """Return the module's contents, with master weights instead of its parameters."""
        contents = super().contents(module_name)
        names = self._parameter_names()
        leaves = {
            leaf.name: leaf for master in self._master_weights() for leaf in _master_leaves(master)
        }
        engine_leaves: dict[str, TensorLeaf] = {}
        clean = NameCleaner(self._module)
        for path, parameter in self._module.named_parameters(remove_duplicate=False):
            leaf = leaves.get(names[id(parameter)])
            if leaf is None and hasattr(parameter, "ds_tensor"):
                leaf = leaf_of_frozen_parameter(parameter, path)
            if leaf is not None:
                full_name = f"{module_name}.{clean(path)}"
                engine_leaves[full_name] = replace(leaf, name=full_name, tie_key=id(parameter))
        contents.tensors = [engine_leaves.get(leaf.name, leaf) for leaf in contents.tensors]
        return contents

    def update_from_master_weights(self) -> None:
        """Compute the module's weights from the master weights. This is a collective."""
        adapter = adapter_of(self._engine.optimizer)
        if adapter is not None:
            adapter.rebuild_weights(self._engine.optimizer)

    def _master_weights(self) -> Iterator[Parameter]:
        adapter = adapter_of(self._engine.optimizer)
        if adapter is not None:
            yield from adapter.find_master_weights(self._engine.optimizer, self._parameter_names())

    def _parameter_names(self) -> dict[int, str]:
        clean = NameCleaner(self._module)
        return {id(each): clean(path) for path, each in self._module.named_parameters()}


class EngineCounters(Binding):
    """An engine's counts of steps and samples, and its loss scale.

    Args:
        prefix: prefix of the names of the engine's values.
    """

    def __init__(self, prefix: str, engine: Any) -> None:
        self.name = f"{prefix}{VALUES_KEY}"
        self._engine = engine

    def local_state(self) -> LocalState:
        """Return the counters as plain values."""
        counters = self._counters()
        return LocalState(objects={name: encode(value, name) for name, value in counters.items()})

    def targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Return the counters that the checkpoint has. Only checkpoints of engines have some."""
        saved_counters = {name: None for name in self._counters() if saved.has_object(name)}
        return selection.select_from(LocalState(objects=saved_counters))

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set the counters and the loss scale."""
        for name in self._counters():
            if name not in values:
                continue
            value = decode(values[name], name)
            key = name.removeprefix(f"{self.name}.")
            if key == LOSS_SCALER:
                _set_loss_scaler(name, _loss_scaler(self._engine.optimizer), value)
            elif isinstance(value, int):
                setattr(self._engine, key, value)
            else:
                raise StateError(
                    f"{name}: expected an integer in the checkpoint, found {value!r}: leave it out "
                    f"with skip=[{name!r}]"
                )

    def _counters(self) -> dict[str, object]:
        counters: dict[str, object] = {key: getattr(self._engine, key) for key in COUNTERS}
        scaler = _loss_scaler(self._engine.optimizer)
        if scaler is not None:
            counters[LOSS_SCALER] = {
                key: getattr(scaler, key) for key in LOSS_SCALER_KEYS if hasattr(scaler, key)
            }
        return {f"{self.name}.{key}": value for key, value in counters.items()}


def _master_leaves(master: Parameter) -> list[TensorLeaf]:
    if not master.flat:
        return [tensor_leaf(master.name, master.tensor)]
    flat = master.tensor.detach()
    return [part.leaf(part.name, flat) for part in master.flat]


def _refuse_unsupported_engine(name: str, engine: Any) -> None:
    """Refuse an engine with features that this module cannot read.

    Raises:
        StateError: names the feature.
    """
    optimizer = engine.optimizer
    is_torch_optimizer = optimizer is None or isinstance(optimizer, Optimizer)
    if not is_torch_optimizer and adapter_of(optimizer) is None:
        unsupported = f"its optimizer {type(optimizer).__name__}"
    elif engine.has_moe_layers:
        unsupported = "experts"
    elif _uses_tensor_parallelism(engine):
        unsupported = "tensor parallelism"
    elif getattr(optimizer, "zenflow", False):
        unsupported = "ZenFlow"
    elif getattr(optimizer, "swap_optimizer", False) or getattr(
        optimizer, "params_in_nvme_and_cpu", False
    ):
        unsupported = "offloading to NVMe"
    elif hasattr(optimizer, "backup_optimizer"):
        unsupported = (
            "offloading the optimizer in part (ratio), which keeps moments in two optimizers,"
        )
    elif any(_is_quantized(parameter) for parameter in engine.module.parameters()):
        unsupported = "quantized weights"
    else:
        return
    raise StateError(
        f"{name}: {unsupported} is not supported for DeepSpeed engines: save with "
        "engine.save_checkpoint(); shardwise can open such checkpoints"
    )


def _uses_tensor_parallelism(engine: Any) -> bool:
    # Only pipelines have a grid. Their model-parallel size includes the stages.
    grid = getattr(engine, "grid", None)
    ranks = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    return bool(ranks > 1 or engine.autotp_size() > 1)


def _is_quantized(parameter: object) -> bool:
    return hasattr(getattr(parameter, "ds_tensor", None), "ds_quant_scale")


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
