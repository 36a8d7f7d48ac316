"""`save`, `load` and `open`: the functions that most users call."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch.distributed as dist

from shardwise.kernel.adapters import local_state_of
from shardwise.kernel.checkpoint import Checkpoint
from shardwise.kernel.engine.buffers import DEFAULT_STAGING_BYTES, Arena
from shardwise.kernel.engine.compile_and_gc import pause_gc, skip_compile
from shardwise.kernel.engine.describe import BoundState
from shardwise.kernel.engine.group import Group, SoloGroup
from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.planning import SaveRequest
from shardwise.kernel.engine.root import Choice
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.save import SaveReport, Storage, save_together
from shardwise.kernel.errors import StateError
from shardwise.kernel.events import Recorder, Sink
from shardwise.kernel.loading import LoadOptions, State, load_state
from shardwise.kernel.manifest.manifest import MIRROR_FILE
from shardwise.kernel.opening import OpenOptions, agree_to_open, refuse_as_destination
from shardwise.kernel.plan.save import PlanCache
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.state.name_lookup import Rename
from shardwise.kernel.store import LocalStore, Store, open_store
from shardwise.kernel.store.places import PLUGINS as STORES
from shardwise.ports.foreign import Specification

Place = str | os.PathLike[str] | Store

log = logging.getLogger("shardwise")


@skip_compile
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
    plan_cache: PlanCache | None = None,
    on_event: Sink | None = None,
) -> SaveReport:
    """Save a state as one checkpoint, which is durable on return. All ranks call this function.

    If the save fails, all ranks raise an error, and nothing is published.

    Example:

        state = {"model": model, "optimizer": optimizer, "epoch": 3}
        report = sw.save("checkpoints/3", state, step=1000, metrics={"loss": 2.5})

    Args:
        place: a directory, which need not exist, or a store.
        state: a dict of modules, optimizers, tensors, objects with `state_dict` and
            `load_state_dict`, plain values, and dicts of these.
        step: the training step of the state, an integer from 0.
        overwrite: replace an existing checkpoint. Otherwise, an existing checkpoint is an error.
        check_replicas: compare tensors that several ranks hold, and raise if they differ.
        metrics: numbers to store with the checkpoint, for example a loss.
        allow_pickle: pickle values that have no plain form. Then `load` needs the option too.
        staging_bytes: bound on the host memory used beyond the state, in bytes; at least 1 MiB.
        group: the ranks. Default: the default process group, or this process alone without one.
        plan_cache: a cache of plans of earlier saves, which this save reads and updates.
        on_event: called with an `Event` after each stage.

    Raises:
        StateError: a value cannot be saved (the message names it), or `place` is a file.
        StateError, ValueError: an option is invalid.
        MismatchError: values, shapes, dtypes or the place differ between ranks.
        LayoutError: the shards of a tensor overlap or leave gaps.
        CheckpointExistsError: `place` already has a checkpoint, or is the root of a run.
        StoreError: the storage failed on this rank.
        RankError: another rank failed.
    """

    def make_request() -> SaveRequest:
        arena, store = Arena(staging_bytes), open_store(place)
        bound = BoundState(local_state_of(state, allow_pickle=allow_pickle))
        request = SaveRequest(state=bound, store=store, arena=arena, step=step,
            overwrite=overwrite, check_replicas=check_replicas, metrics=metrics or {})  # fmt: skip
        if ranks.rank == 0:
            refuse_as_destination(store)
        return request

    warn_without_group(group)
    cache = PlanCache() if plan_cache is None else plan_cache
    with pause_gc(), resolved_group(group) as ranks, Storage() as storage:
        return save_together(make_request, storage, ranks, cache, Recorder(on_event))


@skip_compile
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
    dequantize: bool = False,
    resize: Mapping[str, str] | None = None,
    verify: bool = True,
    allow_pickle: bool = False,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - the usual name
    read_once: bool | None = None,
    staging_bytes: int | None = None,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> LoadReport:
    """Load a checkpoint into a state, with any sharding. All ranks call this function.

    Tensors are filled in place, missing optimizer state is created, and plain values are set in
    the dict. If the state has fewer keys than the checkpoint, only these keys are loaded.

    Example:

        report = sw.load("checkpoints/3", {"model": model, "optimizer": optimizer})

    Args:
        place: a directory or store with a checkpoint, also a foreign one, or the root of a run.
        state: the state to fill; see `save`.
        strict: raise if the checkpoint lacks names of the state, or has further names below the
            keys of the state. If False, report both. A module without saved tensors still raises.
        only, skip: shell patterns of the names of the state to load, and to leave unchanged.
        rename: maps names of the state to saved names: a function, or a mapping of prefixes.
        cast: convert tensors whose dtypes differ, unless quantized. If False, they are an error.
        dequantize: compute the values of block-scaled tensors, such as block FP8 and MXFP4, with
            their scales. If False, they are loaded as stored, and other targets are an error.
        resize: maps shell patterns to `"keep-common"`: copy the elements that both shapes have.
        allow_pickle: unpickle values that were pickled. Use this only for files that you trust.
        step, verify, spec, skip_unknown, format: as for `open`.
        read_once: one node reads what several need, and sends it on. None: only if it saves much.
        staging_bytes, group, on_event: as for `save`; 256 MiB by default for object stores.

    Raises:
        CheckpointNotFoundError, FormatError: as for `open`.
        MismatchError: names, shapes or dtypes do not fit. Nothing was written.
        CorruptionError: bytes differ from the saved bytes. The state is partly written.
        StateError, ValueError: a plain value cannot be restored, or an option is invalid.
        StoreError, OSError: the storage failed on this rank.
        RankError: another rank failed.
    """
    options = LoadOptions(strict=strict, only=only, skip=skip, rename=rename, cast=cast,
        dequantize=dequantize, resize=resize or {}, verify=verify, allow_pickle=allow_pickle,
        read_once=read_once, staging_bytes=staging_bytes, spec=spec, skip_unknown=skip_unknown,
        format=format, step=step)  # fmt: skip
    return load_place(place, state, options, group=group, on_event=on_event)


def load_place(
    place: Place,
    state: State,
    options: LoadOptions,
    *,
    group: dist.ProcessGroup | Group | None,
    on_event: Sink | None,
) -> LoadReport:
    """Load a checkpoint; see `load`."""
    get_store, recorder = partial(open_place, place), Recorder(on_event)
    with pause_gc(), resolved_group(group) as ranks:
        return load_state(get_store, state, options, ranks, recorder)


@skip_compile
def open(  # noqa: A001 - shardwise.open
    place: Place,
    *,
    step: Choice = "newest",
    verify: bool = True,
    allow_pickle: bool = False,
    spec: Specification | None = None,
    skip_unknown: bool = False,
    format: str | None = None,  # noqa: A002 - the usual name
) -> Checkpoint:
    """Open a checkpoint to read tensors and values by name, without a process group or a model.

    Example:

        checkpoint = sw.open("checkpoints/3")
        weight = checkpoint["model.layers.0.wq.weight"].tensor(dtype=torch.float32)

    Args:
        place: a directory or store with a checkpoint, also a foreign one, or the root of a run.
        step: the checkpoint of a root: a step number, `"newest"`, or `sw.Best("loss")`. If the
            place is itself a checkpoint that does not record its step, a number states it.
        verify: check the checksum of every byte that is read. Foreign checkpoints have no such
            checksums; `Checkpoint.verify` compares tensors that they store several times.
        allow_pickle: unpickle values that were pickled. Use this only for files that you trust.
        spec: a specification of how to assemble the tensors; see `shardwise.spec`.
        skip_unknown: skip pickled values of unknown classes, and list them in `left_out`.
            Otherwise, such values are an error.
        format: the foreign format to read, if the directory has several; for example `"dcp"`.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, or the root lacks the selected one.
        FormatError: the manifest is invalid, or the format is unknown.
        StateError: an option is invalid, or `step` is given and the files record a step.
        MismatchError: the specification does not fit the checkpoint.
    """
    options = OpenOptions(spec=spec, skip_unknown=skip_unknown, format=format, step=step)

    with ExitStack() as cleanup, pause_gc():
        store = open_place(place)
        if isinstance(store, LocalStore):
            store = store.with_cached_reads()  # the same checkpoint is often opened again
        alone = SoloGroup()
        with Round(alone, "opening a checkpoint") as this_rank:
            check = agree_to_open(this_rank, store, alone, cleanup, options)
        files, layout = check()
        lock = cleanup.pop_all()
        return Checkpoint(files, layout, verify=verify, allow_pickle=allow_pickle, lock=lock)


def open_place(place: Place) -> Store:
    """Open the store of a place: a path or URL, with its mirror if it has one, or a store."""
    store = open_store(place)
    if isinstance(store, LocalStore) and isinstance(place, (str, os.PathLike)):
        # The place is a root, or the directory of a step in a root.
        root, parent = store.path / MIRROR_FILE, store.path.parent / MIRROR_FILE
        if os.path.lexists(root) or os.path.lexists(parent):
            return load_built_in(STORES, "mirrored")(store)  # type: ignore[no-any-return]
    return store


@contextmanager
def resolved_group(group: dist.ProcessGroup | Group | None) -> Iterator[Group]:
    """Provide the group of ranks while the block runs: `group`, or the default process group.

    The ranks of a process group are connected at the beginning of the block, and disconnected at
    its end.
    """
    if isinstance(group, int):  # GroupMember.NON_GROUP_MEMBER of torch.distributed
        raise StateError(
            "group: this rank is not in the process group; call save and load on its members only"
        )
    if group is None and not (dist.is_available() and dist.is_initialized()):
        yield SoloGroup()
    elif group is None or isinstance(group, dist.ProcessGroup):
        chosen = dist.distributed_c10d._get_default_group() if group is None else group
        with load_built_in("shardwise.groups", "torch.distributed")(chosen, "call") as ranks:
            yield ranks
    else:
        yield group


def warn_without_group(group: dist.ProcessGroup | Group | None = None) -> None:
    """Warn once if a launcher has started several ranks, but they have no process group.

    Each process then saves as the only rank, and all of them save to the same place.
    """
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdigit() and int(ranks) > 1:
        _warn_of_lone_ranks(int(ranks))


@functools.cache
def _warn_of_lone_ranks(ranks: int) -> None:
    log.warning(
        "WORLD_SIZE is %d, but there is no process group: this process saves alone, as if it "
        "were the only rank. Call torch.distributed.init_process_group first",
        ranks,
    )
