"""What a Checkpointer knows of a state from its last save, and how it sees that this still holds.

To find the tensors of a state and to describe them costs about 15 µs a tensor. At the next save, a
`StateBinder` looks at what decides which tensors there are: the keys and objects in the dicts that
hold them, hooks, param groups, and the address and layout of each tensor. If all of this is as
before, the description is as before, too. If anything differs, the state is bound anew, as if there
had been no earlier save. Plain values are always read anew.

Nothing is kept alive from save to save, because a training may need the memory: objects are known
by weak references, and tensors by their addresses. While a save copies the tensors, their storages
are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast
from weakref import ref

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer

from shardwise.kernel.adapters.bind import bind_state, bind_value, binders, is_nested_state, unite
from shardwise.kernel.adapters.values import PerRankBinding, TensorBinding
from shardwise.kernel.engine.describe import BoundState, Described, Recipes, StateToSave
from shardwise.kernel.loading import State
from shardwise.kernel.state.stated_geometry import ATTRIBUTES, METHODS
from shardwise.kernel.state.tensors import local_tensor
from shardwise.ports.binding import Binding, Cells, Fragment, LocalState
from shardwise.ports.module_binding import ObjectBinding, is_dtensor, modules_in

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_VALUES = (ObjectBinding, PerRankBinding, TensorBinding)
"""The bindings that are made anew at each save, because that is the same as to look."""
_STATEMENTS = {*ATTRIBUTES, *METHODS}
Facts = dict[str, object]
"""What must be equal at the next save, by what it is about."""
FIRST = "this is the first save"


@dataclass(slots=True)
class _Sight:
    """What a save sees of a state, before it binds the state.

    Attributes:
        facts: what must be as at the last save.
        tensors: the tensors, always in the same order if the facts are equal. Once their memory is
            looked at, the local tensors stand in place of DTensors.
        distinct: the same tensors without repetitions.
        storages: the storages of the tensors, once their memory is looked at.
        values: the plain values, by the name of the value of the state.
        others: the places of all values of the state but tensors and nested dicts, by name.
        objects: the objects that have cells, by the names of the values.
    """

    facts: Facts = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    distinct: list[torch.Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    values: dict[str, LocalState] = field(default_factory=dict)
    others: dict[str, tuple[State, str]] = field(default_factory=dict)
    objects: dict[str, list[object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the last save knew of a state.

    Attributes:
        facts: what it saw.
        cells: where values keep their tensors, by the names of the values.
        objects: the objects that have the cells.
        order: the names of the values, in the order in which they are saved.
        described: the description of the tensors, without fragments.
        layouts, layouts_in_values: compare the layouts of tensors with those at the last save.
        recipes: how to get the fragments from the tensors.
        of_shards: as in `PlanCache.of_shards`, for the description.
    """

    facts: Facts
    cells: Mapping[str, Cells]
    objects: Mapping[str, Sequence[ref[Any]]]
    order: Sequence[str]
    described: Described
    layouts: TensorGuards
    layouts_in_values: TensorGuards
    recipes: Recipes
    of_shards: frozenset[str]


class _ChangedError(Exception):
    """The state is not as at the last save."""


class StateBinder:
    """Binds the states that a Checkpointer saves, and remembers the last one.

    Args:
        allow_pickle: whether the user allows pickled values.

    Attributes:
        optimizers: the torch optimizers in the last state.
    """

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._known: _Known | None = None
        self._why_unknown = FIRST
        self._optimizers: list[ref[Optimizer]] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """The torch optimizers in the last state."""
        return [each for get in self._optimizers if (each := get()) is not None]

    def bind(self, state: State) -> StateToSave:
        """Return what this rank saves of a state.

        Raises:
            StateError: a value cannot be saved.
        """
        known, why, read = self._known, self._why_unknown, _ReadValues()
        if known is not None:
            try:
                sight = _look(state, known.cells)
                _refuse_changes(sight, known, known.layouts)
                values = self._look_at_values(sight, known.cells, read)
                _refuse_changes(values, known, known.layouts_in_values)
                fragments = known.recipes.fragments(
                    sight.tensors + values.tensors, sight.storages + values.storages
                )
                plain = LocalState()
                for name in known.order:
                    cells = known.cells.get(name)
                    plain.add(values.values[name] if cells is None else cells.values())
                return _PreparedState(self, state, known, plain, fragments, read)
            except _ChangedError as change:
                why = str(change)
        return self.bind_anew(state, why, read)

    def bind_anew(self, state: State, why: str, read: _ReadValues) -> BoundState:
        """Find all tensors and values of a state, and remember them once they are described.

        Args:
            state: the state.
            why: why this is necessary; see `StateToSave.why_bound`.
            read: the values that this save has read.
        """
        self._known, self._why_unknown = None, "the last save failed before its plan was made"
        bindings = bind_state(state, allow_pickle=self._allow_pickle)
        bound = _NewState(self, state, bindings, why, read)
        self._optimizers = [ref(each) for binding in bindings for each in binding.optimizers]
        return bound

    def remember(
        self,
        state: State,
        bindings: Sequence[Binding],
        described: Described,
        of_shards: Collection[str],
        read: _ReadValues,
    ) -> None:
        """Remember a state for the next save, if all its values have cells or are plain values."""
        try:
            cells = _cells_of(bindings)
            sight = _look(state, cells)
            values = self._look_at_values(sight, cells, read)
            tensors = sight.tensors + values.tensors
            sight.facts |= values.facts
            _refuse_unknown(sight, tensors, bindings, cells)
            recipes = Recipes.of(described.fragments, tensors)
            if recipes is None:
                raise _ChangedError("tensors that are copied for the save are always bound anew")
            objects = {name: _references(name, each) for name, each in sight.objects.items()}
        except _ChangedError as change:
            self._why_unknown = str(change)
            return
        self._known = _Known(
            facts=sight.facts,
            cells=cells,
            objects=objects,
            order=[each.name for each in bindings if each.name in sight.others],
            described=replace(described, fragments=()),
            layouts=_guard_layouts(sight),
            layouts_in_values=_guard_layouts(values),
            recipes=recipes,
            of_shards=frozenset(of_shards),
        )

    def _look_at_values(
        self, sight: _Sight, cells: Mapping[str, Cells], read: _ReadValues
    ) -> _Sight:
        """Look at the values that have no cells, which runs code of the user.

        Args:
            sight: the state.
            cells: as in `_Known`.
            read: the values that this save has read.

        Raises:
            _ChangedError: the state is not as at the last save.
        """
        values = _Sight()
        for name, (container, key) in sight.others.items():
            if name in cells:
                continue
            binding = bind_value(name, container, key, allow_pickle=self._allow_pickle)
            if type(binding) not in _VALUES:
                what = type(container[key]).__name__
                raise _ChangedError(f"{name}: a {what} is always bound anew")
            found = read.local_state(binding)
            leaves = [(e.name, e.dtype, e.shape, e.tie_key, e.sharding) for e in found.tensors]
            boxes = [[fragment.box for fragment in leaf.fragments] for leaf in found.tensors]
            values.facts[f"{name}: the tensors in the value"] = type(binding), leaves, boxes
            values.tensors += [each.data for leaf in found.tensors for each in leaf.fragments]
            values.values[name] = replace(found, tensors=[])
        _look_at_memory(values, "tensors in values")
        return values


class _ReadValues:
    """What a save has read of the values that have no cells.

    Each value is read once a save, because that may take long, or may be a collective.
    """

    def __init__(self) -> None:
        self._found: dict[str, LocalState] = {}

    def local_state(self, binding: Binding) -> LocalState:
        """Return the local state of a binding."""
        if type(binding) not in _VALUES:
            return binding.local_state()
        found = self._found.get(binding.name)
        if found is None:
            found = self._found[binding.name] = binding.local_state()
        return found


class _NewState(BoundState):
    """A state that was just bound, which the binder remembers when it is described."""

    def __init__(
        self,
        binder: StateBinder,
        state: State,
        bindings: Sequence[Binding],
        why: str,
        read: _ReadValues,
    ) -> None:
        super().__init__(unite(map(read.local_state, bindings)), why)
        self._binder, self._state, self._bindings, self._read = binder, state, bindings, read

    def describe(self, of_shards: Collection[str]) -> Described:
        """Return the description of the tensors; see `StateToSave.describe`."""
        described = super().describe(of_shards)
        self._binder.remember(self._state, self._bindings, described, of_shards, self._read)
        return described


class _PreparedState:
    """A state that is as at the last save; see `StateToSave`.

    Args:
        binder: binds the state anew, if that turns out to be necessary.
        state: the state.
        known: what is known of it.
        values: its plain values, as they are now.
        fragments: its fragments, as they are now.
        read: the values that this save has read.
    """

    def __init__(
        self,
        binder: StateBinder,
        state: State,
        known: _Known,
        values: LocalState,
        fragments: Sequence[Fragment],
        read: _ReadValues,
    ) -> None:
        self._binder, self._state, self._known = binder, state, known
        self._fragments, self._read = fragments, read
        self.values, self.why_bound = values, ""

    def describe(self, of_shards: Collection[str]) -> Described:
        """Return the description of the last save, with the memory of today."""
        if of_shards != self._known.of_shards:
            return self._bind_anew().describe(of_shards)
        return replace(self._known.described, fragments=self._fragments)

    def elements(self, of_shards: Collection[str]) -> Mapping[str, bytes | None]:
        """Return what ranks must agree on; see `StateToSave.elements`."""
        return self._bind_anew().elements(of_shards)

    def _bind_anew(self) -> BoundState:
        self.why_bound = "the ranks plan this save anew"
        bound = self._binder.bind_anew(self._state, self.why_bound, self._read)
        self.values = bound.values
        return bound


def _look(state: State, cells: Mapping[str, Cells]) -> _Sight:
    """Look at a state, except at the values that have no cells.

    Args:
        cells: as in `_Known`.

    Raises:
        _ChangedError: the state is not as at the last save.
    """
    sight = _Sight()
    keys: list[list[str]] = []
    try:
        _collect(state, "", sight, keys)
    except RecursionError as error:
        raise _ChangedError("a dict contains itself") from error
    sight.facts |= {
        "the keys of dicts": keys,
        "the tensors in dicts": [id(e) for e in sight.tensors if type(e) is not torch.Tensor],
        "the packages that bind values": [name for name, _ in binders()],
    }
    for name, (container, key) in sight.others.items():
        if name in cells:
            _look_at_object(name, container[key], cells[name], sight)
    _look_at_memory(sight, "tensors")
    return sight


def _collect(container: State, prefix: str, sight: _Sight, keys: list[list[str]]) -> None:
    """Add what a dict has, and what the dicts in it have."""
    if type(container) not in (dict, OrderedDict):
        raise _ChangedError(f"the state is a {type(container).__name__}")
    if not {*map(type, container)} <= {str}:
        raise _ChangedError("a key is not a plain string")  # equal keys may have other texts
    keys.append([*container])
    for key, value in container.items():
        if type(value) in _PLAIN or is_dtensor(value):
            sight.tensors.append(value)
        elif is_nested_state(value):
            _collect(value, f"{prefix}{key}.", sight, keys)
        else:
            sight.others[f"{prefix}{key}"] = container, key


def _look_at_object(name: str, value: object, cells: Cells, sight: _Sight) -> None:
    found = cells.look()
    if found is None:
        raise _ChangedError(f"{name} is another object")
    for about, fact in found[0].items():
        sight.facts[f"{name}: {about}"] = fact
    sight.tensors += found[1]
    parts: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
    sight.objects[name] = [*parts, *modules_in(value)]


def _look_at_memory(sight: _Sight, what: str) -> None:
    """Add the addresses and layouts of all tensors. Local tensors take the place of DTensors.

    Raises:
        _ChangedError: a tensor has no memory.
    """
    types = [*map(type, sight.tensors)]
    tensors, sharded = sight.tensors, []
    if not {*types}.issubset(_PLAIN):
        sharded = [each for each in tensors if is_dtensor(each)]
        tensors = [*map(local_tensor, tensors)]
    attributes = chain(tensors, sight.tensors) if sharded else tensors
    try:
        sight.storages = [*map(torch.Tensor.untyped_storage, tensors)]
        sight.facts |= {
            f"the storages of {what}": [*map(torch.UntypedStorage.nbytes, sight.storages)],
            f"the types of {what}": types,
            f"the placements of {what}": [*map(_placements_of, sharded)],
            f"the attributes of {what}": [*chain.from_iterable(map(vars, attributes))],
            f"the addresses of {what}": [*map(torch.Tensor.data_ptr, tensors)],
        }
    except (RuntimeError, NotImplementedError) as error:
        raise _ChangedError("a tensor has no memory") from error
    sight.tensors, sight.distinct = tensors, [*dict.fromkeys(tensors)]
    if len(sight.distinct) < len(tensors):
        first = dict(zip(sight.distinct, range(len(tensors)), strict=False))
        sight.facts[f"the repeated {what}"] = [first[each] for each in tensors]


def _guard_layouts(sight: _Sight) -> TensorGuards:
    """Return what compares the shapes, strides and dtypes of tensors with those that they have now.

    `torch.compile` uses it. It also compares classes, devices, conjugation and negation. It does
    not know repeated tensors, keeps none of them alive, and takes a third of the time of Python's
    loops.
    """
    # torch's own stub has another type.
    sizes: Any = [[*each.shape] for each in sight.distinct]
    strides: Any = [[*each.stride()] for each in sight.distinct]
    return TensorGuards(*sight.distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _placements_of(tensor: Any) -> tuple[object, ...]:
    spec = tensor._spec  # may be changed in place
    order = getattr(spec, "shard_order", None)
    strides_are_order = getattr(spec, "use_strided_shard_as_shard_order", None)
    return spec.mesh, spec.placements, order, strides_are_order, tensor.shape, tensor.dtype


def _refuse_changes(sight: _Sight, known: _Known, layouts: TensorGuards) -> None:
    """Raise `_ChangedError` if anything is not as at the last save."""
    for about, fact in sight.facts.items():
        if known.facts.get(about) != fact:
            raise _ChangedError(f"{about} have changed")
    for name, objects in sight.objects.items():
        if len(objects) != len(known.objects[name]) or any(
            get() is not each for get, each in zip(known.objects[name], objects, strict=True)
        ):
            raise _ChangedError(f"{name} is another object")
    if not layouts.check(*sight.distinct):
        raise _ChangedError("the layouts of tensors have changed")


def _refuse_unknown(
    sight: _Sight,
    tensors: Sequence[torch.Tensor],
    bindings: Sequence[Binding],
    cells: Mapping[str, Cells],
) -> None:
    """Raise `_ChangedError` if the state has something that a later look would not see."""
    if sight.others.keys() - {each.name for each in bindings} or cells.keys() - sight.others.keys():
        raise _ChangedError("a package binds a dict of the state as one value")
    if not {*map(type, tensors)}.issubset(_PLAIN):
        raise _ChangedError("a tensor of another class is always bound anew")
    if any(each.is_quantized for each in tensors):
        raise _ChangedError("a quantized tensor is always bound anew")  # its scale has no address
    if not _STATEMENTS.isdisjoint(cast(list[str], sight.facts["the attributes of tensors"])):
        raise _ChangedError("a tensor that states its boxes is always bound anew")


def _references(name: str, objects: Sequence[object]) -> list[ref[Any]]:
    try:
        return [*map(ref, objects)]
    except TypeError as error:
        raise _ChangedError(
            f"{name}: an object without weak references is always bound anew"
        ) from error


def _cells_of(bindings: Sequence[Binding]) -> dict[str, Cells]:
    """Return the cells of all bindings that have some.

    Raises:
        _ChangedError: a binding has none, and more than plain values.
    """
    found = {}
    for binding in bindings:
        if type(binding) in _VALUES:
            continue
        cells = binding.cells()
        if cells is None:
            raise _ChangedError(f"{binding.name}: this kind of object is always bound anew")
        found[binding.name] = cells
    return found
