"""Load on all ranks: open the checkpoint, match names, plan, read, and restore plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.adapters import bind_state
from shardwise.adapters.optimizer_groups import GROUPS
from shardwise.engine.buffers import Arena
from shardwise.engine.group import Group
from shardwise.engine.load import LoadReport, plan_reads, read_per_rank
from shardwise.engine.match import Matched, agree_on_match, match_targets
from shardwise.engine.rounds import Round
from shardwise.errors import StateError
from shardwise.events import Recorder
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import ObjectEntry
from shardwise.opening import OpenOptions, agree_on_place, open_any
from shardwise.plan.name_lookup import Rename, SavedNames, rename_function
from shardwise.plugins import call_plugin, find_plugins
from shardwise.ports.binding import Binding
from shardwise.ports.read_strategy import GROUP as READ_STRATEGIES
from shardwise.ports.read_strategy import ReadAlone, ReadStrategy
from shardwise.state.leaves import LocalState, ParameterOrder
from shardwise.state.overlaps import copy_overlapping
from shardwise.state.selection import Selection
from shardwise.store import Files, Store

if TYPE_CHECKING:
    from shardwise.resizing import Resizing

STATE, PARAMS = "state", "params"
_Orders = dict[str, list[list[tuple[str, tuple[int, ...]]]]]
"""The parameters of each optimizer, in order, with their shapes."""

State = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `shardwise.load`."""

    strict: bool = True
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    rename: Rename | None = None
    cast: bool = False
    resize: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    allow_pickle: bool = False
    read_once: bool | None = None
    staging_bytes: int | None = None

    def check(self) -> None:
        """Check the options that can be checked before a checkpoint is opened.

        Raises:
            StateError: `only`, `skip` or `rename` has the wrong type.
        """
        Selection.from_patterns(self.only, self.skip)
        rename_function(self.rename)

    @property
    def settings(self) -> str:
        """The options that must be equal on all ranks, formatted for error messages."""
        return (
            f"strict={self.strict}, cast={self.cast}, verify={self.verify}, "
            f"read_once={self.read_once}, "
            f"staging_bytes={self.staging_bytes}, resize={self.resize}"
        )


def load_state(
    get_store: Callable[[], Store],
    state: State,
    options: LoadOptions,
    open_options: OpenOptions,
    group: Group,
    recorder: Recorder,
) -> LoadReport:
    """Load a checkpoint into a state. All ranks call this function together.

    Args:
        get_store: returns the store of the place. A failure on a rank is raised on all ranks.
        state, options, open_options: what to fill, how, and how to read the checkpoint.
        group: the ranks.
        recorder: gets an event for each stage.

    Raises:
        ShardwiseError: as for `shardwise.load`.
    """
    with ExitStack() as cleanup:
        with recorder.stage("open"):
            with Round(group, "beginning a load") as all_ranks:
                options.check()
                bindings = bind_state(state, allow_pickle=options.allow_pickle)
                place = get_store()
                agree_on_place(all_ranks, place, open_options, options.settings)
            store, layout = open_any(place, group, cleanup, open_options)
        with recorder.stage("match"):
            saved, matched, unexpected = _match(layout, bindings, state, options, group)
        arena = Arena(options.staging_bytes, store.traits.transfer)
        with recorder.stage("plan"):
            with Round(group, "planning a load"):
                reads = plan_reads(matched.leaves, saved, store, arena, verify=options.verify)
                strategy = _choose_strategy(group, options.read_once)
            fill = strategy.agree(reads, group, cleanup)
        with Round(group, "loading"):
            with recorder.stage("read"):
                moved = fill()
            with recorder.stage("restore"):
                _restore_values(bindings, matched, saved, store, group, verify=options.verify)
        for binding in bindings:  # outside of a round: bindings may communicate here
            binding.rebuild_weights()
    return LoadReport(
        path=str(store),
        step=layout.step,
        bytes_needed=reads.plan.bytes_needed,
        bytes_read=moved.read,
        bytes_received=moved.received,
        files=len(set(reads.plan.spans.file.tolist())),
        missing=tuple(matched.missing),
        unexpected=unexpected,
        optimizers=_filled_optimizers(bindings, matched),
        seconds=recorder.seconds(),
    )


def _choose_strategy(group: Group, read_once: bool | None) -> ReadStrategy:
    """Return the first strategy that a plug-in returns, or else shardwise's own."""
    if group.size == 1:
        return ReadAlone()
    for entry in find_plugins(READ_STRATEGIES).values():
        strategy = call_plugin(entry, ReadStrategy, group, read_once)  # type: ignore[type-abstract]
        if strategy is not None:
            return strategy
    from shardwise.sharing.strategy import ReadTogether  # other loads need not import it

    return ReadTogether(read_once)


def _filled_optimizers(bindings: Sequence[Binding], matched: Matched) -> tuple[str, ...]:
    names = (each.name for each in bindings if each.kind == "optimizer")
    return tuple(name for name in names if matched.counts[name][1] > 0)


def _match(
    layout: Layout,
    bindings: Sequence[Binding],
    state: State,
    options: LoadOptions,
    group: Group,
) -> tuple[SavedNames, Matched, tuple[str, ...]]:
    """Match the state with the checkpoint on all ranks, before any tensor is written.

    Returns:
        The contents of the checkpoint, with the names and shapes that the state needs; what matches
        on this rank; and the unexpected names.
    """
    rename = rename_function(options.rename)
    selection = Selection.from_patterns(options.only, options.skip)
    resizing = None
    if options.resize:
        from shardwise.resizing import Resizing  # other loads need not import it

        resizing = Resizing.from_patterns(options.resize, bindings, group)
    orders = partial(_parameter_orders, bindings, SavedNames(layout, rename), resizing)
    layout = name_parameters(layout, orders, group)
    if resizing is not None:
        layout = resizing.apply(layout, SavedNames(layout, rename), selection)
    saved = SavedNames(layout, rename)
    with Round(group, "matching names") as all_ranks:
        matched = _match_state(bindings, saved, selection, cast=options.cast)
        unexpected = agree_on_match(
            all_ranks, matched, saved, selection, state, strict=options.strict
        )
    return saved, matched, unexpected


def _parameter_orders(
    bindings: Sequence[Binding], saved: SavedNames, resizing: Resizing | None
) -> dict[str, ParameterOrder]:
    """Return the parameters of each optimizer in order, by the optimizer's name when saved."""
    found: dict[str, ParameterOrder] = {}
    for binding in bindings:
        order = binding.parameter_order()
        if order is not None:
            name = saved.saved_name(f"{binding.name}.{GROUPS}").removesuffix(f".{GROUPS}")
            if resizing is not None:
                order = resizing.order_with_saved_shapes(order, saved)
            found[name] = order
    return found


def _match_state(
    bindings: Sequence[Binding], saved: SavedNames, selection: Selection, *, cast: bool
) -> Matched:
    """Match the values of the state on this rank with the checkpoint."""
    parts = [binding.targets(saved, selection) for binding in bindings]
    targets = unite_local_states(parts)
    targets.tensors = copy_overlapping(targets.tensors)
    names_by_owner: dict[str, Collection[str]] = {}
    for binding, part in zip(bindings, parts, strict=True):
        if binding.kind == "module":
            names_by_owner[binding.name] = [leaf.name for leaf in part.tensors]
        elif binding.kind == "optimizer":
            names_by_owner[binding.name] = [*part.names()]
    return match_targets(targets, saved, selection, names_by_owner, cast=cast)


def unite_local_states(parts: Iterable[LocalState]) -> LocalState:
    """Unite the local states of all bindings.

    Raises:
        StateError: two values have the same name.
    """
    whole = LocalState()
    seen: set[str] = set()
    for part in parts:
        for name in part.names():
            if name in seen:
                raise StateError(
                    f"{name!r}: two values of the state have this name; rename a key of the state"
                )
            seen.add(name)
        whole.add(part)
    return whole


def _restore_values(
    bindings: Sequence[Binding],
    matched: Matched,
    saved: SavedNames,
    store: Files,
    group: Group,
    *,
    verify: bool,
) -> None:
    """Set the plain values that all ranks share, and the per-rank values."""
    values = {name: saved.object(name) for name in matched.objects}
    for binding in bindings:
        binding.restore(values)
    names = {name: saved.saved_name(name) for name in matched.per_rank}
    ranks = read_per_rank(store, saved.layout, list(names.values()), group, verify=verify)
    for binding in bindings:
        if binding.name in names:
            binding.restore_ranks(ranks[names[binding.name]], group.rank, group.size)


def name_parameters(
    layout: Layout, orders: Callable[[], Mapping[str, ParameterOrder]], group: Group
) -> Layout:
    """Name the parameters of optimizers that the checkpoint identifies by position.

    As in `Optimizer.load_state_dict`, the first parameter of a saved group is the first parameter
    of the target's group. An optimizer is left unchanged if the sizes of its groups, or the shapes
    of its state, differ from those of the target. All ranks call this function together.

    Args:
        layout: the checkpoint.
        orders: returns the parameters of each optimizer on this rank, in order. The keys are the
            names of the optimizers in the checkpoint.
        group: the ranks.

    Returns:
        The layout with the names of the target.
    """
    positional = [
        entry.name.removesuffix(f".{GROUPS}")
        for entry in layout.objects
        if entry.name.endswith(f".{GROUPS}") and _positions_of(entry.value) is not None
    ]
    if not positional:
        return layout

    with Round(group, "naming parameters") as all_ranks:
        known = all_ranks.all_reduce(dict(orders()), _Orders, _equal_or_none, _Orders)
    for optimizer in positional:
        if optimizer in known:
            layout = _name_parameters(layout, optimizer, known[optimizer])
    return layout


def _equal_or_none(orders: list[dict[str, ParameterOrder]]) -> dict[str, ParameterOrder]:
    """Return the orders if they are equal on all ranks, or nothing."""
    return orders[0] if all(each == orders[0] for each in orders) else {}


def _positions_of(groups: Any) -> list[list[int]] | None:
    """Return the positions of each group's parameters; None if the groups have names instead."""
    try:
        found = msgspec.convert(groups, list[dict[str, Any]])
        return msgspec.convert([group.get(PARAMS) for group in found], list[list[int]])
    except msgspec.ValidationError:
        return None


def _name_parameters(layout: Layout, optimizer: str, order: ParameterOrder) -> Layout:
    """Return the layout with names for one optimizer, or the same layout if they do not fit."""
    groups = next(each.value for each in layout.objects if each.name == f"{optimizer}.{GROUPS}")
    positions = _positions_of(groups) or []
    if [len(each) for each in positions] != [len(each) for each in order]:
        return layout
    pairs = zip(
        (position for each in positions for position in each),
        (parameter for each in order for parameter in each),
        strict=True,
    )
    parameters = {f"{optimizer}.{STATE}.{position}": parameter for position, parameter in pairs}
    tensors = []
    for entry in layout.tensors:
        owner, _, key = entry.name.rpartition(".")
        parameter_name, shape = parameters.get(owner, ("", ()))
        if parameter_name and entry.shape not in ((), shape):
            return layout
        name = f"{optimizer}.{parameter_name}.{key}" if parameter_name else entry.name
        tensors.append(msgspec.structs.replace(entry, name=name))
    named_groups = [
        {
            "members": [name for name, _ in members],
            "value": {key: value for key, value in settings.items() if key != PARAMS},
        }
        for members, settings in zip(order, groups, strict=True)
    ]
    objects = tuple(
        ObjectEntry(each.name, named_groups) if each.name == f"{optimizer}.{GROUPS}" else each
        for each in layout.objects
    )
    return replace(layout, tensors=tuple(tensors), objects=objects)
