"""FullyShardedDataParallel (FSDP1): turn flat parameters into boxes, without communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from shardwise.kernel.errors import user_code
from shardwise.ports.binding import (
    Context,
    FlatRange,
    LocalState,
    Parameter,
    SavedNames,
    Selection,
    TensorLeaf,
)
from shardwise.ports.module_binding import (
    ModuleBinding,
    Part,
    buffers_of,
    extra_states,
    is_instance,
    modules_in,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle


def bind(name: str, value: object, context: Context) -> FSDP1Binding | None:
    """Return the binding of modules of which a part is wrapped in FullyShardedDataParallel."""
    modules = modules_in(value)
    return FSDP1Binding(name, modules, context) if has_fsdp1(modules) else None


def has_fsdp1(modules: Iterable[nn.Module]) -> bool:
    """Return whether a part of the modules is wrapped in FullyShardedDataParallel."""
    return any(_is_wrapped(part) for module in modules for part in module.modules())


def _is_wrapped(module: nn.Module) -> bool:
    return is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


class FSDP1Binding(ModuleBinding):
    """A model with flat parameters, which have the names and shapes of the original ones."""

    has_whole_state_dict = False

    def parameters(self) -> Iterator[Parameter]:
        """Yield flat parameters, views of the original ones, and parameters outside of units."""
        for module_part in self._parts:
            for flat, _, ranges in _flat_parameters(module_part, self.name):
                yield Parameter(flat, "", tuple(ranges))
                for original, part in zip(flat._params or (), ranges, strict=False):
                    yield Parameter(original, "", (replace(part, start=0),))
        yield from super().parameters()

    def all_targets(self, saved: SavedNames, selection: Selection) -> LocalState:
        """Free the gathered parameters that an evaluation leaves behind, and return the shards.

        Otherwise the next forward would use the old gathered values.
        """
        for part in self._parts:
            for _, handle in _fsdp_units(part.module):
                initialized = hasattr(handle.flat_param, "_local_shard")
                if initialized and handle.uses_sharded_strategy and not handle.needs_unshard():
                    handle.reshard(free_unsharded_flat_param=True)
        return super().all_targets(saved, selection)

    def _entries(
        self, part: Part, entries: Mapping[str, object] | None = None
    ) -> Iterator[tuple[str, object]]:
        if has_fsdp1([part.module]):
            yield from self._fsdp1_entries(part)
            with user_code(self.name, "get_extra_state()"):
                entries = dict(extra_states(part.module))  # state_dict() would gather parameters
        yield from super()._entries(part, entries)

    def _fsdp1_entries(self, module_part: Part) -> Iterator[tuple[str, object]]:
        module = module_part.module
        leaves: dict[str, TensorLeaf] = {}
        tied: dict[str, TensorLeaf] = {}
        flat_ids: set[int] = set()
        for flat, prefix, ranges in _flat_parameters(module_part, self.name):
            flat_ids.add(id(flat))
            flat_ids.update(id(original) for original in flat._params or ())
            local = getattr(flat, "_local_shard", flat).detach()
            for part in ranges:
                name = f"{self.name}.{part.name}"
                leaves[name] = part.leaf(name, local, tie_key=name)
            for info in flat._shared_param_infos:
                name = module_part.name(f"{prefix}{info.module_name}.{info.param_name}")
                first = f"{prefix}{info.prim_module_name}.{info.prim_param_name}"
                tied[name] = replace(leaves[module_part.name(first)], name=name)
        leaves |= tied
        yield from leaves.items()
        for path, parameter in module.named_parameters(remove_duplicate=False):
            name = module_part.name(path)
            if id(parameter) not in flat_ids and name not in leaves:
                yield name, parameter
        for path, buffer in buffers_of(module, persistent=True):
            yield module_part.name(path), buffer


def _flat_parameters(
    part: Part, binding: str
) -> Iterator[tuple[FlatParameter, str, list[FlatRange]]]:
    """Yield each flat parameter, the path prefix of its unit, and its original parameters."""
    for path, handle in _fsdp_units(part.module):
        flat = handle.flat_param
        prefix = f"{path}." if path else ""
        ranges = []
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for fqn, shape, info in infos:
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            local_range = (0, 0) if first is None or last is None else (first, last + 1)
            name = part.name(prefix + fqn).removeprefix(f"{binding}.")
            ranges.append(
                replace(
                    FlatRange.whole(name, shape).cut(*local_range),
                    start=info.offset_in_shard or 0,
                )
            )
        yield flat, prefix, ranges


def _fsdp_units(module: nn.Module) -> Iterator[tuple[str, FlatParamHandle]]:
    """Yield the path and the handle of each FSDP unit that has parameters."""
    for path, part in module.named_modules():
        if _is_wrapped(part) and part._handle is not None:
            yield path, part._handle
