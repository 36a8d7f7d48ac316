"""DeepSpeed's engines and optimizers, recognised by the names of their classes, not imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.adapters.binding import Binding
from shardwise.adapters.deepspeed_optimizer import frozen_leaf, is_optimizer_of_engine, kind_of
from shardwise.adapters.modules import Contents, ModuleWeights
from shardwise.adapters.parameters import CleanNames, Parameter
from shardwise.adapters.tensors import tensor_leaf
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
    """Return whether a value is an engine of DeepSpeed."""
    return any(
        (kind.__module__, kind.__name__) == ("deepspeed.runtime.engine", "DeepSpeedEngine")
        for kind in type(value).__mro__
    )


def torch_optimizer_of(value: object) -> Optimizer | None:
    """Return the torch optimizer inside an engine or one of DeepSpeed's optimizers, if any."""
    wrapped: Any = value.optimizer if is_engine(value) else value  # type: ignore[attr-defined]
    inner = wrapped.optimizer if is_optimizer_of_engine(wrapped) else wrapped
    return inner if isinstance(inner, Optimizer) else None


def wrapped_by(name: str, optimizer: object) -> Optimizer:
    """Return the torch optimizer inside one of DeepSpeed's optimizers.

    Raises:
        StateError: there is none.
    """
    inner = torch_optimizer_of(optimizer)
    if inner is None:
        raise StateError(f"{name}: {type(optimizer).__name__} wraps no torch optimizer")
    return inner


def refuse_inside_engine(name: str, module: nn.Module) -> None:
    """Refuse a module whose weights DeepSpeed divides, or has master weights of.

    Raises:
        StateError: the module needs its engine.
    """
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise StateError(
                f"{name}: DeepSpeed keeps the weights of this module elsewhere: put the engine "
                'itself into the state, as in {"model": engine, "optimizer": engine.optimizer}'
            )


class EngineWeights(ModuleWeights):
    """The weights of an engine: master weights where its optimizer steps these.

    Raises:
        StateError: the engine is of an unknown kind.
    """

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__([engine.module])
        _refuse_unknown(name, engine)
        self._engine = engine
        self._module: nn.Module = engine.module

    def parameters(self) -> Iterator[Parameter]:
        """Yield what its optimizer may hold: master weights, or the module's parameters."""
        yield from self._masters()
        yield from super().parameters()

    def steps(self, optimizer: Optimizer) -> bool:
        """Return whether this is the engine's optimizer."""
        return torch_optimizer_of(self._engine) is optimizer

    def contents(self, root: str) -> Contents:
        """Return the module's contents, with weights from where DeepSpeed keeps them."""
        found = super().contents(root)
        names = self._names()
        leaves = {leaf.name: leaf for master in self._masters() for leaf in _master_leaves(master)}
        elsewhere: dict[str, TensorLeaf] = {}
        clean = CleanNames(self._module)
        for path, parameter in self._module.named_parameters(remove_duplicate=False):
            leaf = leaves.get(names[id(parameter)])
            if leaf is None and hasattr(parameter, "ds_tensor"):
                leaf = frozen_leaf(parameter, path)
            if leaf is not None:
                full = f"{root}.{clean(path)}"
                elsewhere[full] = replace(leaf, name=full, identity=id(parameter))
        found.tensors = [elsewhere.get(leaf.name, leaf) for leaf in found.tensors]
        return found

    def rebuild(self) -> None:
        """Compute the module's weights from the master weights. A collective."""
        kind = kind_of(self._engine.optimizer)
        if kind is not None:
            kind.rebuild(self._engine.optimizer)

    def _masters(self) -> Iterator[Parameter]:
        kind = kind_of(self._engine.optimizer)
        if kind is not None:
            yield from kind.masters(self._engine.optimizer, self._names())

    def _names(self) -> dict[int, str]:
        clean = CleanNames(self._module)
        return {id(each): clean(path) for path, each in self._module.named_parameters()}


class EngineCounters(Binding):
    """An engine's counts of steps and samples, and its loss scale.

    Args:
        prefix: prefix of the names of the engine's values.
    """

    def __init__(self, prefix: str, engine: Any) -> None:
        self.name = f"{prefix}{VALUES}"
        self._engine = engine

    def local_state(self) -> LocalState:
        """Return the counters as plain values."""
        counters = self._counters()
        return LocalState(objects={name: encode(value, name) for name, value in counters.items()})

    def targets(self, saved: SavedState, selection: Selection) -> LocalState:
        """Return the counters that the checkpoint has. One of another framework has none."""
        wanted = {name: None for name in self._counters() if saved.has_object(name)}
        return selection.of(LocalState(objects=wanted))

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
                raise StateError(f"{name}: expected an integer, found {value!r}")

    def _counters(self) -> dict[str, object]:
        counters: dict[str, object] = {key: getattr(self._engine, key) for key in COUNTERS}
        scaler = _loss_scaler(self._engine.optimizer)
        if scaler is not None:
            counters[LOSS_SCALER] = {
                key: getattr(scaler, key) for key in OF_LOSS_SCALER if hasattr(scaler, key)
            }
        return {f"{self.name}.{key}": value for key, value in counters.items()}


def _master_leaves(master: Parameter) -> list[TensorLeaf]:
    if not master.flat:
        return [tensor_leaf(master.name, master.tensor)]
    flat = master.tensor.detach()
    return [part.leaf(part.name, flat) for part in master.flat]


def _refuse_unknown(name: str, engine: Any) -> None:
    """Refuse an engine whose structures are not known to be read correctly.

    Raises:
        StateError: the engine is of an unknown kind.
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
        f"{name}: {what} is not supported for DeepSpeed engines: save with "
        "engine.save_checkpoint(); shardwise can open such checkpoints"
    )


def _tensor_parallel(engine: Any) -> bool:
    grid = getattr(engine, "grid", None)  # of a pipeline, whose stages count as model-parallel
    ranks = engine.mp_world_size if grid is None else grid.get_slice_parallel_world_size()
    return bool(ranks > 1 or engine.autotp_size() > 1)


def _is_quantized(parameter: object) -> bool:
    return hasattr(getattr(parameter, "ds_tensor", None), "ds_quant_scale")


def _loss_scaler(optimizer: object) -> object | None:
    """Return the loss scaler if its scale changes during the training."""
    if not getattr(optimizer, "dynamic_loss_scale", False):
        config = getattr(optimizer, "loss_scale_config", None)
        return config if getattr(config, "dynamic_loss_scale", False) else None
    return getattr(optimizer, "loss_scaler", None)


def _set_loss_scaler(name: str, scaler: object, value: object) -> None:
    if not isinstance(value, Mapping):
        raise StateError(f"{name}: expected the state of a loss scaler, found {value!r}")
    for key in OF_LOSS_SCALER:
        if hasattr(scaler, key) and isinstance(value.get(key), (int, float)):
            setattr(scaler, key, value[key])
