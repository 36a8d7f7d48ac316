"""DeepSpeed: an engine, and its optimizer. DeepSpeed is not imported: classes go by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.modules import ModuleBinding
from shardwise.adapters.optimizers import OptimizerBinding, ParameterMap
from shardwise.adapters.parameters import CleanNames, Parameter
from shardwise.adapters.zero import (
    filled_groups,
    frozen_leaf,
    is_optimizer_of_engine,
    kind_of,
    master_leaves,
)
from shardwise.errors import StateError
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, TensorLeaf
from shardwise.state.objects import JsonValue, decode, encode
from shardwise.state.selection import Selection

VALUES = "deepspeed"
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
LOSS_SCALER = "loss_scaler"
OF_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def is_engine(value: object) -> bool:
    """Whether a value is an engine of DeepSpeed."""
    return any(
        (kind.__module__, kind.__name__) == ("deepspeed.runtime.engine", "DeepSpeedEngine")
        for kind in type(value).__mro__
    )


def stepped_by(value: object) -> Optimizer | None:
    """The optimizer of torch's kind that steps what an engine, or an optimizer of one, has."""
    wrapped: Any = value.optimizer if is_engine(value) else value  # type: ignore[attr-defined]
    inner = wrapped.optimizer if is_optimizer_of_engine(wrapped) else wrapped
    return inner if isinstance(inner, Optimizer) else None


def wrapped_by(name: str, optimizer: object) -> Optimizer:
    """The optimizer of torch's kind inside one of an engine.

    Raises:
        StateError: there is none.
    """
    inner = stepped_by(optimizer)
    if inner is None:
        raise StateError(f"{name}: {type(optimizer).__name__} wraps no optimizer of torch's kind")
    return inner


def refuse_inside_engine(name: str, module: nn.Module) -> None:
    """Refuse a module whose weights DeepSpeed divides, or has masters of, without its engine.

    Raises:
        StateError: it is one.
    """
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise StateError(
                f"{name}: DeepSpeed keeps its weights elsewhere than in the module: put the engine "
                'itself into the state, as in {"model": engine, "optimizer": engine.optimizer}'
            )


class EngineBinding(Binding):
    """An engine: the weights that it steps in full precision, all else of its module, its counts.

    Args:
        name: of the module.
        prefix: what the names of the engine's own values begin with.
    """

    def __init__(self, name: str, prefix: str, engine: Any, *, allow_pickle: bool) -> None:
        self.name = name
        self.prefix = prefix
        self._values = f"{prefix}{VALUES}."
        self._engine = engine
        self._module: nn.Module = engine.module
        self._bound = ModuleBinding(name, [self._module], allow_pickle=allow_pickle)
        _refuse_unknown(name, engine)

    def parameters(self) -> Iterator[Parameter]:
        """What its optimizer may hold: weights of its own, or the module's."""
        yield from self._masters()
        yield from self._bound.parameters()

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this is the optimizer by which it steps."""
        return stepped_by(self._engine) is optimizer

    def local_state(self) -> LocalState:
        """Weights by the module's names, whatever DeepSpeed keeps them in, and counts."""
        held = self._divided(self._bound.local_state())
        held.objects |= {name: encode(value, name) for name, value in self._counts().items()}
        return held

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """The same. Counts that the checkpoint lacks, not being of DeepSpeed, stay as they are."""
        held = self._divided(self._bound.targets(saved, Selection()))
        held.objects |= {name: None for name in self._counts() if saved.has_object(name)}
        return selection.of(held)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """Set counts; the module's own weights follow in `rebuild_weights`."""
        self._bound.restore(values)
        for name in self._counts():
            if name not in values:
                continue
            value = decode(values[name], name)
            if name == f"{self._values}{LOSS_SCALER}":
                _set_loss_scaler(name, _loss_scaler(self._engine.optimizer), value)
            elif isinstance(value, int):
                setattr(self._engine, name.removeprefix(self._values), value)
            else:
                raise StateError(f"{name}: {value!r} is no count")

    def rebuild_weights(self) -> None:
        """Compute the module's weights from the master weights that were loaded."""
        kind = kind_of(self._engine.optimizer)
        with torch.no_grad():
            if kind is not None:
                kind.settle(self._engine.optimizer)

    def _masters(self) -> Iterator[Parameter]:
        kind = kind_of(self._engine.optimizer)
        if kind is not None:
            yield from kind.masters(self._engine.optimizer, self._names())

    def _names(self) -> dict[int, str]:
        clean = CleanNames(self._module)
        return {id(each): clean(path) for path, each in self._module.named_parameters()}

    def _counts(self) -> dict[str, object]:
        counts: dict[str, object] = {key: getattr(self._engine, key) for key in COUNTERS}
        scaler = _loss_scaler(self._engine.optimizer)
        if scaler is not None:
            counts[LOSS_SCALER] = {
                key: getattr(scaler, key) for key in OF_LOSS_SCALER if hasattr(scaler, key)
            }
        return {f"{self._values}{key}": value for key, value in counts.items()}

    def _divided(self, held: LocalState) -> LocalState:
        """The module's local state with what DeepSpeed keeps elsewhere in its place."""
        names = self._names()
        leaves = {leaf.name: leaf for master in self._masters() for leaf in master_leaves(master)}
        elsewhere: dict[str, TensorLeaf] = {}
        clean = CleanNames(self._module)
        for path, parameter in self._module.named_parameters(remove_duplicate=False):
            leaf = leaves.get(names[id(parameter)])
            if leaf is None and hasattr(parameter, "ds_tensor"):
                leaf = frozen_leaf(parameter, path)
            if leaf is not None:
                full = f"{self.name}.{clean(path)}"
                elsewhere[full] = replace(leaf, name=full, identity=id(parameter))
        held.tensors = [elsewhere.get(leaf.name, leaf) for leaf in held.tensors]
        return held


class EngineOptimizerBinding(Binding):
    """An engine's optimizer: state of flat weights by the names of the parameters in them."""

    def __init__(
        self,
        name: str,
        optimizer: Any,
        parameters: Callable[[], ParameterMap],
        *,
        allow_pickle: bool,
    ) -> None:
        inner = wrapped_by(name, optimizer)
        self.name = name
        self._optimizer = optimizer
        self._bound = OptimizerBinding(name, [inner], parameters, allow_pickle=allow_pickle)

    def local_state(self) -> LocalState:
        """As of any optimizer."""
        with filled_groups(self._optimizer):
            return self._bound.local_state()

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """As of any optimizer."""
        with filled_groups(self._optimizer):
            return self._bound.targets(saved, selection)

    def restore(self, values: Mapping[str, JsonValue]) -> None:
        """As of any optimizer."""
        with filled_groups(self._optimizer):
            self._bound.restore(values)


def _refuse_unknown(name: str, engine: Any) -> None:
    """Refuse what is not known to be described as it is.

    Raises:
        StateError: there is something.
    """
    optimizer = engine.optimizer
    plain = optimizer is None or isinstance(optimizer, Optimizer)
    if not plain and kind_of(optimizer) is None:
        what = f"its optimizer {type(optimizer).__name__}"
    elif engine.has_moe_layers:
        what = "experts"
    elif _tensor_parallel(engine):
        what = "tensor parallelism"
    elif getattr(optimizer, "zenflow", False):
        what = "ZenFlow"
    elif getattr(optimizer, "swap_optimizer", False) or getattr(
        optimizer, "params_in_nvme_and_cpu", False
    ):
        what = "offloading to NVMe"
    elif hasattr(optimizer, "backup_optimizer"):
        what = "offloading the optimizer in part (ratio), which keeps moments in two optimizers,"
    elif any(_is_quantized(parameter) for parameter in engine.module.parameters()):
        what = "quantized weights"
    else:
        return
    raise StateError(
        f"{name}: {what} is more than is known of DeepSpeed's engines: save by "
        "engine.save_checkpoint(); such checkpoints can be opened where they lie"
    )


def _tensor_parallel(engine: Any) -> bool:
    grid = getattr(engine, "grid", None)  # of a pipeline, whose stages count as model-parallel
    ranks = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    return bool(ranks > 1 or engine.autotp_size() > 1)


def _is_quantized(parameter: object) -> bool:
    return hasattr(getattr(parameter, "ds_tensor", None), "ds_quant_scale")


def _loss_scaler(optimizer: object) -> object | None:
    """What scales losses, if its scale changes as the training goes on."""
    if not getattr(optimizer, "dynamic_loss_scale", False):
        config = getattr(optimizer, "loss_scale_config", None)
        return config if getattr(config, "dynamic_loss_scale", False) else None
    return getattr(optimizer, "loss_scaler", None)


def _set_loss_scaler(name: str, scaler: object, value: object) -> None:
    if not isinstance(value, Mapping):
        raise StateError(f"{name}: {value!r} is no state of a loss scaler")
    for key in OF_LOSS_SCALER:
        if hasattr(scaler, key) and isinstance(value.get(key), (int, float)):
            setattr(scaler, key, value[key])
