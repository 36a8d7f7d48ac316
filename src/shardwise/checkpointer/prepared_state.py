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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, cast, overload
from weakref import ref

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer

from shardwise.adapters.bind import bind_state, bind_value, binders, is_nested_state, unite
from shardwise.adapters.modules import modules_in
from shardwise.adapters.values import ObjectBinding, PerRankBinding, TensorBinding
from shardwise.boxes import Box
from shardwise.engine.describe import BoundState, Described, StateToSave
from shardwise.loading import State
from shardwise.ports.binding import Binding, Cells
from shardwise.state.local_state import Fragment, LocalState, memory_extent
from shardwise.state.stated_geometry import ATTRIBUTES, METHODS
from shardwise.state.tensors import is_dtensor, local_tensor

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
        tensors: the tensors, always in the same order if the facts are equal.
        distinct: the tensors, or their local tensors, without repetitions.
        values: the plain values, by the name of the value of the state.
        others: the places of all values of the state but tensors and nested dicts, by name.
        objects: the objects that have cells, by the names of the values.
    """

    facts: Facts = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)
    distinct: list[torch.Tensor] = field(default_factory=list)
    values: dict[str, LocalState] = field(default_factory=dict)
    others: dict[str, tuple[State, str]] = field(default_factory=dict)
    objects: dict[str, list[object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to get the memory of a fragment from one of the tensors that were looked at.

    Attributes:
        tensor: the index of the tensor.
        start: where the fragment begins in the memory of the tensor, in bytes.
        shape, stride: those of the fragment.
        dtype: the dtype of the fragment.
    """

    tensor: int
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class PreparedFragments(Sequence[Fragment]):
    """Fragments that are made when they are asked for. They keep the memory of all alive.

    Args:
        boxes: the box of each fragment.
        recipes: how to get the memory of each fragment.
        tensors: the tensors that hold the memory.
    """

    def __init__(
        self, boxes: Sequence[Box], recipes: Sequence[_Recipe], tensors: Sequence[torch.Tensor]
    ) -> None:
        self._boxes, self._recipes = boxes, recipes
        # The training may give a tensor other memory during the copy.
        self._storages = [*map(torch.Tensor.untyped_storage, tensors)]
        self._addresses = [*map(torch.Tensor.data_ptr, tensors)]

    def __len__(self) -> int:
        return len(self._boxes)

    @overload
    def __getitem__(self, index: int) -> Fragment: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Fragment]: ...
    def __getitem__(self, index: int | slice) -> Fragment | Sequence[Fragment]:
        """Return a fragment."""
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        recipe = self._recipes[index]
        storage = self._storages[recipe.tensor]
        begin = self._addresses[recipe.tensor] + recipe.start - storage.data_ptr()
        data = torch.empty(0, dtype=recipe.dtype, device=storage.device)
        data.set_(storage, begin // data.element_size(), recipe.shape, recipe.stride)
        return Fragment(self._boxes[index], data)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the last save knew of a state.

    Attributes:
        facts: what it saw.
        cells: where values keep their tensors, by the names of the values.
        objects: the objects that have the cells.
        order: the names of the values, in the order in which they are saved.
        described: the description of the tensors, without fragments.
        has_layouts: whether tensors have the layouts that they had.
        boxes, recipes: those of the fragments.
        of_shards: as in `PlanCache.of_shards`, for the description.
    """

    facts: Facts
    cells: Mapping[str, Cells]
    objects: Mapping[str, Sequence[ref[Any]]]
    order: Sequence[str]
    described: Described
    has_layouts: TensorGuards
    boxes: Sequence[Box]
    recipes: Sequence[_Recipe]
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
        known, why = self._known, self._why_unknown
        if known is not None:
            try:
                sight = self._look(state, known.cells)
                tensors = _look_at_memory(sight)
                _refuse_changes(sight, known)
                fragments = PreparedFragments(known.boxes, known.recipes, tensors)
                values = LocalState()
                for name in known.order:
                    cells = known.cells.get(name)
                    values.add(sight.values[name] if cells is None else cells.values())
                return _PreparedState(self, state, known, values, fragments)
            except _ChangedError as change:
                why = str(change)
        return self.bind_anew(state, why)

    def bind_anew(self, state: State, why: str) -> BoundState:
        """Find all tensors and values of a state, and remember them once they are described.

        Args:
            state: the state.
            why: why this is necessary; see `StateToSave.why_bound`.
        """
        self._known, self._why_unknown = None, "the last save failed before its plan was made"
        bindings = bind_state(state, allow_pickle=self._allow_pickle)
        bound = _NewState(self, state, bindings, why)
        self._optimizers = [ref(each) for binding in bindings for each in binding.optimizers]
        return bound

    def remember(
        self,
        state: State,
        bindings: Sequence[Binding],
        described: Described,
        of_shards: Collection[str],
    ) -> None:
        """Remember a state for the next save, if all its values have cells or are plain values."""
        try:
            cells = _cells_of(bindings)
            sight = self._look(state, cells)
            tensors = _look_at_memory(sight)
            _refuse_unknown(sight, tensors, bindings)
            fragments = described.fragments
            recipes = _recipes_of(fragments, tensors)
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
            has_layouts=_guard_layouts(sight.distinct),
            boxes=[each.box for each in fragments],
            recipes=recipes,
            of_shards=frozenset(of_shards),
        )

    def _look(self, state: State, cells: Mapping[str, Cells]) -> _Sight:
        """Look at a state.

        Args:
            cells: as in `_Known`.

        Raises:
            _ChangedError: the state is not as at the last save.
        """
        sight = _Sight()
        keys: list[list[str]] = []
        types: list[list[type]] = []
        try:
            _collect(state, "", sight, keys, types)
        except RecursionError as error:
            raise _ChangedError("a dict contains itself") from error
        loose = [id(each) for each in sight.tensors if type(each) is not torch.Tensor]
        sight.facts |= {"the keys of dicts": keys, "the types of values": types}
        sight.facts |= {"the tensors in dicts": loose, "the packages that bind values": [
            name for name, _ in binders()
        ]}  # fmt: skip
        for name, (container, key) in sight.others.items():
            if name in cells:
                _look_at_object(name, container[key], cells[name], sight)
            else:
                self._look_at_value(name, container, key, sight)
        return sight

    def _look_at_value(self, name: str, container: State, key: str, sight: _Sight) -> None:
        binding = bind_value(name, container, key, allow_pickle=self._allow_pickle)
        if type(binding) not in _VALUES:
            raise _ChangedError(f"{name}: a {type(container[key]).__name__} is always bound anew")
        found = binding.local_state()
        leaves = [(e.name, e.dtype, e.shape, e.tie_key, e.sharding) for e in found.tensors]
        fragments = [each for leaf in found.tensors for each in leaf.fragments]
        boxes = [[fragment.box for fragment in leaf.fragments] for leaf in found.tensors]
        sight.facts[f"{name}: the tensors in the value"] = leaves, boxes
        sight.tensors += [each.data for each in fragments]
        sight.values[name] = replace(found, tensors=[])


class _NewState(BoundState):
    """A state that was just bound, which the binder remembers when it is described."""

    def __init__(
        self, binder: StateBinder, state: State, bindings: Sequence[Binding], why: str
    ) -> None:
        super().__init__(unite(bindings), why)
        self._binder, self._state, self._bindings = binder, state, bindings

    def describe(self, of_shards: Collection[str]) -> Described:
        """Return the description of the tensors; see `StateToSave.describe`."""
        described = super().describe(of_shards)
        self._binder.remember(self._state, self._bindings, described, of_shards)
        return described


class _PreparedState:
    """A state that is as at the last save; see `StateToSave`.

    Args:
        binder: binds the state anew, if that turns out to be necessary.
        state: the state.
        known: what is known of it.
        values: its plain values, as they are now.
        fragments: its fragments, as they are now.
    """

    def __init__(
        self,
        binder: StateBinder,
        state: State,
        known: _Known,
        values: LocalState,
        fragments: PreparedFragments,
    ) -> None:
        self._binder, self._state, self._known = binder, state, known
        self._fragments = fragments
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
        bound = self._binder.bind_anew(self._state, self.why_bound)
        self.values = bound.values
        return bound


def _collect(
    container: State,
    prefix: str,
    sight: _Sight,
    keys: list[list[str]],
    types: list[list[type]],
) -> None:
    """Add what a dict has, and what the dicts in it have."""
    if not isinstance(container, dict):
        raise _ChangedError(f"the state is a {type(container).__name__}")
    values = [*container.values()]
    classes = [*map(type, values)]
    keys.append([*container])
    types.append(classes)
    for key, value, cls in zip(container, values, classes, strict=True):
        if cls in _PLAIN or is_dtensor(value):
            sight.tensors.append(value)
        elif is_nested_state(value):
            _collect(value, f"{prefix}{key}.", sight, keys, types)
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


def _look_at_memory(sight: _Sight) -> list[torch.Tensor]:
    """Add the addresses and layouts of all tensors, and return them, or their local tensors.

    Raises:
        _ChangedError: a tensor has no memory.
    """
    types = [*map(type, sight.tensors)]
    tensors, sharded = sight.tensors, []
    if not {*types}.issubset(_PLAIN):
        sharded = [each for each in tensors if is_dtensor(each)]
        tensors = [*map(local_tensor, tensors)]
        sight.facts["the types of local tensors"] = [*map(type, tensors)]
        sight.facts["the placements of tensors"] = [each._spec for each in sharded]
    attributes = chain(tensors, sight.tensors) if sharded else tensors
    try:
        addresses = [*map(torch.Tensor.data_ptr, tensors)]
    except (RuntimeError, NotImplementedError) as error:
        raise _ChangedError("a tensor has no memory") from error
    sight.facts |= {
        "the types of tensors": types,
        "the attributes of tensors": [*chain.from_iterable(map(vars, attributes))],
        "the addresses of tensors": addresses,
    }
    sight.distinct = [*dict.fromkeys(tensors)]
    if len(sight.distinct) < len(tensors):
        first = dict(zip(sight.distinct, range(len(tensors)), strict=False))
        sight.facts["tensors that are there twice"] = [first[each] for each in tensors]
    return tensors


def _guard_layouts(distinct: Sequence[torch.Tensor]) -> TensorGuards:
    """Return a function that says whether tensors still have these shapes, strides and dtypes.

    `torch.compile` uses it. It also compares devices, conjugation and negation. It does not know
    repeated tensors, keeps none of them alive, and takes a third of the time of Python's loops.
    """
    # torch's own stub has another type.
    sizes: Any = [[*each.shape] for each in distinct]
    strides: Any = [[*each.stride()] for each in distinct]
    return TensorGuards(*distinct, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)


def _refuse_changes(sight: _Sight, known: _Known) -> None:
    """Raise `_ChangedError` if anything is not as at the last save."""
    for about, fact in sight.facts.items():
        if known.facts.get(about) != fact:
            raise _ChangedError(f"{about} have changed")
    for name, objects in sight.objects.items():
        if len(objects) != len(known.objects[name]) or any(
            get() is not each for get, each in zip(known.objects[name], objects, strict=True)
        ):
            raise _ChangedError(f"{name} is another object")
    if not known.has_layouts.check(*sight.distinct):
        raise _ChangedError("the layouts of tensors have changed")


def _refuse_unknown(
    sight: _Sight, tensors: Sequence[torch.Tensor], bindings: Sequence[Binding]
) -> None:
    """Raise `_ChangedError` if the state has something that a later look would not see."""
    if sight.others.keys() - {each.name for each in bindings}:
        raise _ChangedError("a package binds a dict of the state as one value")
    if not {*map(type, tensors)}.issubset(_PLAIN):
        raise _ChangedError("a tensor of another class is always bound anew")
    if not _STATEMENTS.isdisjoint(cast(list[str], sight.facts["the attributes of tensors"])):
        raise _ChangedError("a tensor that states its boxes is always bound anew")


def _references(name: str, objects: Sequence[object]) -> list[ref[Any]]:
    try:
        return [*map(ref, objects)]
    except TypeError as error:
        raise _ChangedError(
            f"{name}: an object without weak references is always bound anew"
        ) from error


def _recipes_of(fragments: Sequence[Fragment], tensors: Sequence[torch.Tensor]) -> list[_Recipe]:
    """Return how to get the memory of each fragment from one of the tensors.

    Raises:
        _ChangedError: a fragment has other memory, for example a copy that was made for the save.
    """
    holders: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensor in enumerate(tensors):
        start = tensor.data_ptr()
        stop = start + memory_extent(tensor) * tensor.element_size() if tensor.numel() else start
        holders.setdefault(tensor.untyped_storage().data_ptr(), []).append((index, start, stop))
    recipes = []
    for fragment in fragments:
        data = fragment.data
        first = data.data_ptr()
        last = first + memory_extent(data) * data.element_size()
        holder = next(
            (
                (index, start)
                for index, start, stop in holders.get(data.untyped_storage().data_ptr(), ())
                if start <= first and last <= stop
            ),
            None,
        )
        if holder is None or data.is_conj() or data.is_neg():
            raise _ChangedError("tensors that are copied for the save are always bound anew")
        index, start = holder
        shape, stride = tuple(data.shape), data.stride()
        recipes.append(_Recipe(index, first - start, shape, stride, data.dtype))
    return recipes


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
