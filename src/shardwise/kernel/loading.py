"""Load on all ranks: open the checkpoint, match names, plan, read, and restore plain values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import msgspec

from shardwise.kernel.adapters import bind_state
from shardwise.kernel.adapters.optimizer_groups import GROUPS
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.buffers import SMALLEST_BUFFER, Arena
from shardwise.kernel.engine.group import Group, TimedGroup
from shardwise.kernel.engine.load import LoadReport, RankReads, ReadAlone, plan_reads
from shardwise.kernel.engine.match import MatchReport, agree_on_match, make_report, match_targets
from shardwise.kernel.engine.per_rank_values import read_per_rank
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import StateError
from shardwise.kernel.events import Recorder
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import ObjectEntry
from shardwise.kernel.opening import OpenOptions, agree_to_open
from shardwise.kernel.plugins import (
    PluginError,
    call_plugin,
    find_plugins,
    ignore_failure,
    load_built_in,
)
from shardwise.kernel.state.local_state import (
    LocalState,
    ParameterOrder,
    TensorLeaf,
    copy_overlapping,
)
from shardwise.kernel.state.name_lookup import Rename, SavedNames, Selection, rename_function
from shardwise.kernel.state.tensors import mesh_axes
from shardwise.kernel.store import Files, Store, count_retries
from shardwise.ports.binding import Binding
from shardwise.ports.read_strategy import GROUP as READ_STRATEGIES
from shardwise.ports.read_strategy import ReadStrategy

STATE, PARAMS = "state", "params"
_Orders = dict[str, list[list[tuple[str, tuple[int, ...]]]]]
"""The parameters of each optimizer, in order, with their shapes."""

State = MutableMapping[str, Any]


@prepare_decoding
class _PositionalGroup(msgspec.Struct):
    """A saved group of parameters that are identified by their positions in the optimizer."""

    params: list[int]


class Resizing(Protocol):
    """The tensors that a load resizes."""

    def apply(self, layout: Layout, saved: SavedNames, selection: Selection) -> Layout:
        """Return a layout in which the tensors have the shapes of the targets."""

    def order_with_saved_shapes(self, order: ParameterOrder, saved: SavedNames) -> ParameterOrder:
        """Return the order of an optimizer's parameters with the shapes that they were saved in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(OpenOptions):
    """How to open a checkpoint and to load it; see `shardwise.load`.

    Attributes:
        needs_step: refuse to load an optimizer from a checkpoint whose step is unknown.
    """

    strict: bool = True
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    rename: Rename | None = None
    cast: bool = False
    dequantize: bool = False
    resize: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    allow_pickle: bool = False
    read_once: bool | None = None
    staging_bytes: int | None = None
    needs_step: bool = False

    @property
    def settings(self) -> str:
        """The options that must be equal on all ranks, formatted for error messages."""
        return (
            f"strict={self.strict}, cast={self.cast}, dequantize={self.dequantize}, "
            f"verify={self.verify}, "
            f"read_once={self.read_once}, "
            f"staging_bytes={self.staging_bytes}, resize={self.resize}"
        )


def load_state(
    get_store: Callable[[], Store],
    state: State,
    options: LoadOptions,
    group: Group,
    recorder: Recorder,
) -> LoadReport:
    """Load a checkpoint into a state. All ranks call this function together.

    Args:
        get_store: returns the store of the place. A failure on a rank is raised on all ranks.
        state, options, group, recorder: what to fill, how, the ranks, and what gets the events.

    Raises:
        ShardwiseError: as for `shardwise.load`.
    """
    group = TimedGroup(group, recorder)
    with ExitStack() as cleanup:
        with recorder.stage("open"):
            with Round(group, "opening a checkpoint") as all_ranks:
                selection = Selection(options.only, options.skip)
                rename = rename_function(options.rename)
                bindings = bind_state(state, allow_pickle=options.allow_pickle)
                place, settings = get_store(), options.settings
                check = agree_to_open(all_ranks, place, group, cleanup, options, settings)
            store, layout = check()
        with recorder.stage("match"):
            saved = _saved_names(layout, rename, bindings, options.resize, selection, group)
            if options.dequantize:
                saved = load_built_in("shardwise.quantized", "dequantize")(saved)
        path, strict = str(store), options.strict
        with Round(group, "matching names") as all_ranks:
            with recorder.stage("match"):
                targets, own = _match(bindings, saved, selection, state, options, group.rank)
                recorder.axes = mesh_axes(targets.tensors)
            with recorder.stage("plan"):
                if layout.step is None and options.needs_step:
                    refuse_unknown_step(path, _loaded_optimizers(bindings, targets, own))
                arena = Arena(options.staging_bytes, store.traits)
                leaves: Sequence[TensorLeaf] = targets.tensors
                if options.dequantize:
                    leaves = _convert(leaves, saved, store, arena, verify=options.verify)
                reads = plan_reads(leaves, saved, store, arena, verify=options.verify)
                strategy = _choose_strategy(group, options.read_once)
            with recorder.stage("match"):
                unexpected = agree_on_match(all_ranks, own, path, saved, state, strict=strict)
        with recorder.stage("plan"):
            fill = strategy.agree(reads, group, cleanup)
        with Round(group, "loading"):
            _read(fill, reads, store, recorder)
            with recorder.stage("restore"):
                _restore_values(bindings, targets, saved, store, group, verify=options.verify)
        for binding in bindings:  # outside of a round: bindings may communicate here
            binding.rebuild_weights()
    return _make_report(path, saved, reads, own, unexpected, bindings, recorder)


def _convert(
    leaves: Sequence[TensorLeaf], saved: SavedNames, store: Files, arena: Arena, *, verify: bool
) -> Sequence[TensorLeaf]:
    """Return leaves whose quantized tensors are dequantized as they are filled."""
    stored = SavedNames(saved.layout)
    # A thread that fills a tensor holds a buffer of `arena`, and may have to read scales.
    size = max(SMALLEST_BUFFER, arena.threads * arena.buffer_size // 8)
    spare = Arena(size, store.traits)

    def read(scales: Sequence[TensorLeaf]) -> int:
        reads = plan_reads(scales, stored, store, spare, verify=verify)
        reads.fill_alone()
        return reads.bytes_read

    return saved.as_stored(leaves, read)


def _make_report(
    path: str,
    saved: SavedNames,
    reads: RankReads,
    own: MatchReport,
    unexpected: Sequence[str],
    bindings: Sequence[Binding],
    recorder: Recorder,
) -> LoadReport:
    return LoadReport(
        path=path,
        step=saved.layout.step,
        bytes_needed=reads.bytes_needed,
        bytes_read=reads.bytes_read + saved.scale_bytes,
        bytes_received=reads.bytes_received,
        files=len(set(reads.spans.file.tolist())),
        missing=tuple(own.missing),
        unexpected=tuple(unexpected),
        optimizers=_names_of_optimizers(bindings, own.filled),
        dequantized=tuple(saved.dequantized),
        seconds=recorder.seconds(),
        record=recorder.record(),
    )


def refuse_unknown_step(path: str, optimizers: Sequence[str]) -> None:
    """Refuse to continue a training from a checkpoint whose step is unknown.

    Args:
        path: the path of the checkpoint.
        optimizers: the names of the optimizers that are loaded. Without any, the training starts.

    Raises:
        StateError: there are optimizers.
    """
    if optimizers:
        raise StateError(
            f"{path} has state of {', '.join(optimizers)}, but neither its files nor its path say "
            "after which step it was saved, so the training would start at step 0 again: state the "
            "step, with start_from=lambda state: sw.load("
            f"{path!r}, state, step=…), or move the checkpoint to a directory such as step-500"
        )


def _loaded_optimizers(
    bindings: Iterable[Binding], targets: LocalState, own: MatchReport
) -> Sequence[str]:
    """Return the optimizers that a load fills, also those that the state has as plain tensors."""
    keys = {name.partition(".")[0] for name in targets.names() if name not in own.missing}
    plain = sorted(key for key in keys if key.startswith("optim"))
    return _names_of_optimizers(bindings, own.filled) or plain


def _names_of_optimizers(bindings: Iterable[Binding], filled: Iterable[str]) -> tuple[str, ...]:
    loaded = set(filled)
    return tuple(b.name for b in bindings if b.kind == "optimizer" and b.name in loaded)


def _read(fill: Callable[[], object], reads: RankReads, store: Files, recorder: Recorder) -> None:
    """Fill the tensors of this rank, as a stage."""
    with recorder.stage("read") as stage:
        retries = count_retries(store)
        fill()
        stage.bytes, stage.retries = reads.bytes_read, count_retries(store) - retries


def _choose_strategy(group: Group, read_once: bool | None) -> ReadStrategy:
    """Return the first strategy that a plug-in returns, or else shardwise's own."""
    if group.size == 1:
        return ReadAlone()
    for entry in find_plugins(READ_STRATEGIES):
        try:
            strategy = call_plugin(entry, ReadStrategy, group, read_once)  # type: ignore[type-abstract]
        except PluginError as error:
            ignore_failure(error)
            continue
        if strategy is not None:
            return strategy
    own: ReadStrategy = load_built_in(READ_STRATEGIES, "read_once")(group, read_once)
    return own


def _saved_names(
    layout: Layout,
    rename: Callable[[str], str],
    bindings: Sequence[Binding],
    resize: Mapping[str, str],
    selection: Selection,
    group: Group,
) -> SavedNames:
    """Return the contents of the checkpoint, with the names and shapes that the state needs."""
    saved = SavedNames(layout, rename)
    resizing: Resizing | None = None
    if resize:
        resizing = load_built_in("shardwise.resizing", "resize")(resize, bindings, group)
    orders = partial(_parameter_orders, bindings, saved, resizing)
    named = name_parameters(layout, orders, group)
    if resizing is not None:
        named = resizing.apply(named, SavedNames(named, rename), selection)
    return saved if named is layout else SavedNames(named, rename)


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


def _match(
    bindings: Sequence[Binding],
    saved: SavedNames,
    selection: Selection,
    keys: Iterable[str],
    options: LoadOptions,
    rank: int,
) -> tuple[LocalState, MatchReport]:
    """Match the values of the state on this rank with the checkpoint.

    Returns:
        What to load on this rank: the tensors that the checkpoint has, and the values. And the
        report of the match.
    """
    parts = [binding.targets(saved, selection) for binding in bindings]
    targets = LocalState.unite(parts)
    targets.tensors = copy_overlapping(targets.tensors)
    names_by_owner: dict[str, Collection[str]] = {}
    for binding, part in zip(bindings, parts, strict=True):
        if binding.kind == "module":
            names_by_owner[binding.name] = [leaf.name for leaf in part.tensors]
        elif binding.kind == "optimizer":
            names_by_owner[binding.name] = [*part.names()]
    leaves, missing, problems = match_targets(targets, saved, cast=options.cast)
    report = make_report(targets, saved, selection, names_by_owner, keys, missing, problems, rank)
    targets.tensors = leaves
    return targets, report


def _restore_values(
    bindings: Sequence[Binding],
    targets: LocalState,
    saved: SavedNames,
    store: Files,
    group: Group,
    *,
    verify: bool,
) -> None:
    """Set the plain values that all ranks share, and the per-rank values."""
    names = [*targets.objects, *targets.grouped]
    values = {name: saved.object(name) for name in names if saved.has_object(name)}
    for binding in bindings:
        binding.restore(values)
    per_rank = {n: saved.saved_name(n) for n in targets.per_rank if saved.has_per_rank(n)}
    if not per_rank:
        return
    ranks = read_per_rank(store, saved.layout, list(per_rank.values()), group, verify=verify)
    for binding in bindings:
        if binding.name in per_rank:
            binding.restore_ranks(ranks[per_rank[binding.name]], group.rank, group.size)


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
    positional = {}
    for entry in layout.objects:
        if entry.name.endswith(f".{GROUPS}"):
            with suppress(msgspec.ValidationError):  # groups with names instead of positions
                if groups := msgspec.convert(entry.value, list[_PositionalGroup]):
                    name = entry.name.removesuffix(f".{GROUPS}")
                    positional[name] = [group.params for group in groups]
    if not positional:
        return layout

    with Round(group, "naming parameters") as all_ranks:
        known = all_ranks.all_reduce(dict(orders()), _Orders, _equal_or_none)
    for optimizer, positions in positional.items():
        if optimizer in known:
            layout = _name_parameters(layout, optimizer, positions, known[optimizer])
    return layout


def _equal_or_none(orders: Sequence[dict[str, ParameterOrder]]) -> dict[str, ParameterOrder]:
    """Return the orders if they are equal on all ranks, or nothing."""
    return orders[0] if all(each == orders[0] for each in orders) else {}


def _name_parameters(
    layout: Layout, optimizer: str, positions: list[list[int]], order: ParameterOrder
) -> Layout:
    """Return the layout with names for one optimizer, or the same layout if they do not fit."""
    if [*map(len, positions)] != [*map(len, order)]:
        return layout
    parameters = {
        f"{optimizer}.{STATE}.{position}": parameter
        for position, parameter in zip(chain(*positions), chain(*order), strict=True)
    }
    tensors = []
    for entry in layout.tensors:
        owner, _, key = entry.name.rpartition(".")
        if owner not in parameters:
            tensors.append(entry)
            continue
        name, shape = parameters[owner]
        if entry.shape not in ((), shape):
            return layout
        tensors.append(msgspec.structs.replace(entry, name=f"{optimizer}.{name}.{key}"))
    objects = []
    for each in layout.objects:
        value = each.value
        if each.name == f"{optimizer}.{GROUPS}":
            value = [
                {
                    "members": [name for name, _ in members],
                    "value": {key: value for key, value in settings.items() if key != PARAMS},
                }
                for members, settings in zip(order, value, strict=True)
            ]
        objects.append(ObjectEntry(each.name, value))
    return replace(layout, tensors=tuple(tensors), objects=tuple(objects))
