"""save, load, open: all that most users call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from shardwise.adapters import Binding, asked_of, bind_state, optimizer_names
from shardwise.adapters.tensors import fillable_leaves
from shardwise.checkpoint import Checkpoint
from shardwise.engine.buffers import DEFAULT_STAGING_BYTES, Arena
from shardwise.engine.calls import uncompiled, without_collection
from shardwise.engine.compare import check_sample
from shardwise.engine.exchange import exchange
from shardwise.engine.group import TIMEOUT, Group, SoloGroup, TorchGroup, moves_cpu_tensors
from shardwise.engine.load import GroupFilling, LoadReport, plan_filling
from shardwise.engine.match import GROUPS, Matched, agree_on_match, match, with_names_by_position
from shardwise.engine.opened import Opened, read_per_rank
from shardwise.engine.options import LoadOptions, SaveOptions
from shardwise.engine.planning import Save
from shardwise.engine.save import SaveReport, save_all
from shardwise.errors import StateError
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.manifest.names import MANIFEST, checked_name
from shardwise.opening import Reading, open_any, place_below, refuse_file, refuse_foreign
from shardwise.plan.cache import PlanCache
from shardwise.plan.lookup import Rename, SavedState, renaming
from shardwise.resizing import Resizing
from shardwise.retention import Choice
from shardwise.state.leaves import LocalState, ParameterOrder, TensorLeaf
from shardwise.state.selection import Selection
from shardwise.store import Store, open_store

Place = str | os.PathLike[str] | Store
State = MutableMapping[str, Any]
Index = str | os.PathLike[str]


@uncompiled
def save(
    place: Place,
    state: State,
    *,
    step: int | None = None,
    overwrite: bool = False,
    check_replicas: bool = False,
    metrics: Mapping[str, float] | None = None,
    allow_pickle: bool = False,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    group: dist.ProcessGroup | Group | None = None,
    plans: PlanCache | None = None,
    on_event: Sink | None = None,
) -> SaveReport:
    """Save a state as one checkpoint. It is durable when this returns. All ranks call it.

    If the save fails, all ranks raise, and nothing is published.

    Args:
        place: a directory, which need not exist, or a store.
        state: a dict of modules, optimizers, tensors, objects with `state_dict` and
            `load_state_dict`, plain values, and dicts of these.
        step: the training step of the state.
        overwrite: replace an existing checkpoint. Without it, that is an error.
        check_replicas: compare tensors that several ranks hold, and raise if they differ.
        metrics: numbers to store with the checkpoint, such as a loss.
        allow_pickle: pickle values that have no plain form; loading them needs it too.
        staging_bytes: bound on the host memory used beyond the state, in bytes.
        group: the ranks. Default: the default process group, or this process alone without one.
        plans: a cache of plans of earlier saves, which this save reads and updates.
        on_event: called after each stage.

    Raises:
        StateError: a value cannot be saved (the message names it), or `place` is a file.
        MismatchError: values, shapes, dtypes or the place differ between ranks.
        LayoutError: the shards of a tensor overlap or leave gaps.
        CheckpointExistsError: `place` already has a checkpoint.
        StoreError, OSError: the storage failed on this rank.
        RankError: another rank failed.
    """
    recorder = Recorder(on_event)

    def prepare() -> Save:
        options = SaveOptions.checked(step, overwrite, check_replicas, metrics)
        arena = Arena(staging_bytes)
        local = local_state_of(state, allow_pickle=allow_pickle)
        store = open_store(place)
        if ranks.rank == 0:
            refuse_foreign(store)
            refuse_file(store)
        return Save(state=local, store=store, arena=arena, options=options)

    with without_collection(), resolved_group(group) as ranks:
        return save_all(prepare, ranks, PlanCache() if plans is None else plans, recorder)


@uncompiled
def load(
    place: Place,
    state: State,
    *,
    step: Choice = "newest",
    strict: bool = True,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    resize: Mapping[str, str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - as it is called everywhere
    index: Index | None = None,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> LoadReport:
    """Load a checkpoint into a state in place, with any sharding. All ranks call it.

    Tensors are filled in place, missing optimizer state is created, and plain values are set in
    the dict. A state with fewer keys than the checkpoint loads only those.

    Args:
        place: a directory or store with a checkpoint (ours or foreign), or the root of a run.
        state: the state to fill; see `save`.
        step: which checkpoint of a root: a step number, `"newest"`, or `sw.Best("loss")`.
        strict: raise if the checkpoint lacks names of the state, or has more names below the keys
            of the state. If False, report both; a module that gets nothing at all still raises.
        only, skip: shell patterns of the target's names to load, and to leave unchanged.
        rename: maps target names to checkpoint names: a function, or a mapping of prefixes.
        cast: convert tensors whose dtypes differ. Without it, that is an error.
        resize: maps names or shell patterns to "keep-common": load what both shapes share.
        allow_pickle: unpickle values that were saved as pickle. Only for files that you trust.
        verify, spec, skip_unknown, format, index: see `open`.
        staging_bytes, group, on_event: see `save`.

    Raises:
        CheckpointNotFoundError, FormatError: there is no checkpoint, or its manifest is invalid.
        MismatchError: names, shapes or dtypes do not fit, or copies differ. Nothing was written.
        CorruptionError: bytes differ from those that were saved. The state is partly written.
        StateError: a plain value cannot be restored.
        RankError: another rank failed.
    """
    job = _Load(
        state,
        Recorder(on_event),
        LoadOptions(strict=strict, cast=cast, verify=verify),
        partial(Selection.by, only, skip),
        partial(renaming, rename),
        staging_bytes,
        allow_pickle,
        Reading(spec, index, skip_unknown, format),
        resize or {},
    )
    with without_collection(), resolved_group(group) as ranks, ExitStack() as cleanup:
        return job.run(entered(place, step, ranks), ranks, cleanup)


@uncompiled
def open(  # noqa: A001 - shardwise.open
    place: Place,
    *,
    step: Choice = "newest",
    verify: bool = True,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - as it is called everywhere
    index: Index | None = None,
) -> Checkpoint:
    """Open a checkpoint to read tensors and values by name. Needs no process group or model.

    Args:
        place: a directory or store with a checkpoint (ours or foreign), or the root of a run.
        step: which checkpoint of a root: a step number, `"newest"`, or `sw.Best("loss")`.
        verify: check the checksum of every byte that is read. A foreign checkpoint is not
            checked; if it stores a tensor several times, a sample of the copies is compared.
        spec: how to assemble its tensors, in the language of docs/language.md; see
            `shardwise.spec`.
        skip_unknown: skip pickled values of unknown classes, and list them in `left_out`. Without
            it, they are an error.
        format: `"dcp"`, `"hf"` …: the format to read, if the directory has several.
        index: a file that caches what was found in a foreign checkpoint, so that it opens faster
            the next time.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or the root lacks the selected one.
        FormatError: the manifest is invalid, or the format is unknown.
    """
    with without_collection():
        enter = entered(place, step, SoloGroup())
        reading = Reading(spec, index, skip_unknown, format)
        opened = open_any(enter, SoloGroup(), reading=reading)
        return Checkpoint(opened, verify=verify)


def entered(place: Place, step: Choice, group: Group) -> Callable[[], Store]:
    """Gives the store of the checkpoint at a place, or of the chosen one below a root.

    All ranks together.

    Raises:
        ShardwiseError: as `place_below` says.
    """
    enter = partial(open_store, place)
    below = place_below(enter, step, group)
    return (lambda: enter().at(below)) if below else enter


@contextmanager
def resolved_group(group: dist.ProcessGroup | Group | None) -> Iterator[Group]:
    """The ranks to talk to: those given, those of the default process group, or none.

    A group that moves no CPU tensors is not used; a gloo group of all ranks is made for the time.
    """
    if isinstance(group, int):  # what torch gives those that are not in a new group
        raise StateError("this rank is not in the group: only its members save and load with it")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        yield SoloGroup()
    elif group is None or isinstance(group, dist.ProcessGroup):
        chosen = dist.group.WORLD if group is None else group
        if chosen is None or moves_cpu_tensors(chosen):
            yield TorchGroup(chosen or dist.distributed_c10d._get_default_group())
            return
        own = dist.new_group(dist.get_process_group_ranks(chosen), TIMEOUT, "gloo")
        try:
            yield TorchGroup(own)
        finally:
            dist.destroy_process_group(own)
    else:
        yield group


def local_state_of(state: State, *, allow_pickle: bool) -> LocalState:
    """Return what this rank saves of a state.

    Raises:
        StateError: a value cannot be saved, or a manifest cannot have its name.
    """
    held = _united(each.local_state() for each in bind_state(state, allow_pickle=allow_pickle))
    for name in held.names():
        checked_name(name)
    return held


def _united(parts: Iterable[LocalState]) -> LocalState:
    held = LocalState()
    seen: set[str] = set()
    for part in parts:
        for name in part.names():
            if name in seen:
                raise StateError(f"{name!r}: two values of the state have this name")
            seen.add(name)
        held.add(part)
    return held


@dataclass(frozen=True, slots=True)
class _Load:
    """One load on one rank."""

    state: State
    recorder: Recorder
    options: LoadOptions
    select: Callable[[], Selection]
    rename: Callable[[], Callable[[str], str]]
    staging_bytes: int
    allow_pickle: bool
    reading: Reading
    resize: Mapping[str, str]

    def run(self, chosen: Callable[[], Store], group: Group, cleanup: ExitStack) -> LoadReport:
        """Open, match on all ranks, read, and restore plain values."""
        checked: list[tuple[Selection, Callable[[str], str], Arena]] = []

        def enter() -> Store:
            # What may fail on this rank alone fails where the others hear of it.
            checked.append((self.select(), self.rename(), Arena(self.staging_bytes)))
            store = chosen()
            cleanup.enter_context(store.hold(MANIFEST, shared=True))
            return store

        with self.recorder.stage("open"):
            terms = f"{self.options}, staging_bytes={self.staging_bytes}, resize={self.resize}"
            opened = open_any(enter, group, terms, self.reading)
        selection, rename, arena = checked[0]
        opened = self._fitted(opened, rename, selection, group)
        saved = SavedState(opened.manifest, rename, opened.absent)
        bindings: list[Binding] = []

        def look() -> Matched:
            bindings.extend(bind_state(self.state, allow_pickle=self.allow_pickle))
            parts = [binding.targets(saved, selection) for binding in bindings]
            asked = asked_of(bindings, parts)
            held = _united(parts)
            held.tensors = fillable_leaves(held.tensors)
            return match(held, saved, selection, asked, cast=self.options.cast)

        with self.recorder.stage("match"):
            found, unexpected = agree_on_match(
                look, saved, selection, self.state, group, strict=self.options.strict
            )
        filling = self._planned(found.leaves, saved, opened, arena, group, cleanup)
        counted: list[int] = []

        def move() -> bytes:
            with self.recorder.stage("read"):
                counted.append(filling.fill(verify=self.options.verify))
            with self.recorder.stage("restore"):
                self._restore(bindings, found, saved, opened, group)
            return b""

        exchange(group, "loading", move, lambda _: b"")
        for binding in bindings:
            binding.rebuild_weights()
        plan = filling.filling.plan
        filled = (name for name in optimizer_names(bindings) if found.counts[name][1] > 0)
        return LoadReport(
            path=str(opened.store),
            step=opened.manifest.step,
            bytes_needed=plan.bytes_needed,
            bytes_read=counted[0],
            files=len(set(plan.spans.file.tolist())),
            missing=tuple(found.missing),
            unexpected=unexpected,
            optimizers=tuple(filled),
            seconds=self.recorder.seconds(),
        )

    def _fitted(
        self, opened: Opened, rename: Callable[[str], str], selection: Selection, group: Group
    ) -> Opened:
        """A checkpoint with the target's names where optimizers number parameters, and resized."""
        resizing = Resizing.agreed(self.resize, self.state, group)
        orders = partial(self._orders, SavedState(opened.manifest, rename), resizing)
        opened = with_names_by_position(opened, orders, group)
        return resizing.applied(opened, SavedState(opened.manifest, rename), selection)

    def _planned(
        self,
        leaves: Sequence[TensorLeaf],
        saved: SavedState,
        opened: Opened,
        arena: Arena,
        group: Group,
        cleanup: ExitStack,
    ) -> GroupFilling:
        """What each rank reads, once copies of it were compared."""
        if self.options.verify:
            check_sample(opened, saved, leaves, arena, self.recorder, group)
        with self.recorder.stage("plan"):
            prepare = partial(plan_filling, leaves, saved, opened, arena)
            return GroupFilling(prepare, opened, arena, group, cleanup)

    def _orders(self, saved: SavedState, resizing: Resizing) -> dict[str, ParameterOrder]:
        """The order of parameters in optimizers of the state, by their names in the checkpoint."""
        found: dict[str, ParameterOrder] = {}
        for binding in bind_state(self.state, allow_pickle=self.allow_pickle):
            order = binding.parameter_order()
            if order is not None:
                name = saved.saved_name(f"{binding.name}.{GROUPS}").removesuffix(f".{GROUPS}")
                found[name] = resizing.order_before(order, saved)
        return found

    def _restore(
        self,
        bindings: Sequence[Binding],
        found: Matched,
        saved: SavedState,
        opened: Opened,
        group: Group,
    ) -> None:
        values = {name: saved.object(name) for name in found.objects}
        for binding in bindings:
            binding.restore(values)
        names = {name: saved.saved_name(name) for name in found.per_rank}
        ranks = read_per_rank(opened, list(names.values()), group, verify=self.options.verify)
        for binding in bindings:
            if binding.name in names:
                binding.restore_ranks(ranks[names[binding.name]], group.rank, group.size)
