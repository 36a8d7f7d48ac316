"""Combine checkpoints: `average` several, or `merge_lora` into a base, in bounded memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import msgspec
import torch.distributed as dist

from shardwise.api import Place, resolved_group
from shardwise.convert.average import average_manifests, normalize_weights
from shardwise.convert.export import (
    MAX_FILE,
    MAX_MEMORY,
    ExportOptions,
    digest_source,
    write_export,
)
from shardwise.convert.lora import AdapterConfig, Change, decode_config, find_changes
from shardwise.convert.plan import Source
from shardwise.convert.sources import AverageSource, CheckpointSource, MergedSource
from shardwise.convert.write import ConversionReport, CopiesToCompare, chunk_size
from shardwise.engine.buffers import Arena
from shardwise.engine.compile_and_gc import pause_gc
from shardwise.engine.exchange import run_on_all, run_on_first
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import MismatchError, StateError
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.manifest.manifest import Manifest
from shardwise.manifest.names import MANIFEST
from shardwise.opening import DEFAULT_OPTIONS, OpenOptions, find_step_directory, open_any
from shardwise.state.selection import Selection
from shardwise.store import Files, Store, open_store, resolve_links

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
LARGEST_CONFIG = 1 << 20


def average(
    places: Sequence[Place],
    target: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    take_first: Sequence[str] = (),
    to: str = "native",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    root: str = "model",
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    verify: bool = True,
    spec: Specification | None = None,
    format: str | None = None,  # noqa: A002 - the usual name
    max_memory: int = MAX_MEMORY,
    max_file: int = MAX_FILE,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write the weighted average of several checkpoints. All ranks call it and share the work.

    Floating-point tensors are averaged in double precision and rounded once, to the dtype of the
    first checkpoint. Other tensors must be equal in all checkpoints. Plain values that differ are
    left out. The result has no metrics; it has a step only if all checkpoints have the same step.

    Args:
        places: two or more checkpoints with the same names and shapes, in any formats. Of a root,
            the newest checkpoint is read.
        target: a new directory.
        weights: one number per checkpoint; only their ratios matter. Default: equal weights.
        take_first: shell patterns of names to take from the first checkpoint.
        to, only, skip, root, dtype, config, verify, spec, format, max_memory, max_file, group,
            on_event: as for `export`. `only=["model.*"]` averages the weights alone.

    Raises:
        MismatchError: names or shapes differ, or tensors that cannot be averaged are not equal.
        CheckpointExistsError, StateError, CorruptionError: as for `export`.
    """
    options = ExportOptions(
        target=target,
        to=to,
        only=only,
        skip=skip,
        root=root,
        dtype=dtype,
        config=config,
        verify=verify,
        max_memory=max_memory,
        max_file=max_file,
    )
    with pause_gc(), resolved_group(group) as ranks, ExitStack() as cleanup:
        job = _CombineJob(options, ranks, Recorder(on_event), cleanup)
        return job.average(places, weights, take_first, OpenOptions(spec=spec, format=format))


def merge_lora(
    base: Place,
    adapter: Place,
    target: str | os.PathLike[str],
    *,
    alpha: float | None = None,
    to: str = "native",
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    root: str = "model",
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    verify: bool = True,
    spec: Specification | None = None,
    format: str | None = None,  # noqa: A002 - the usual name
    max_memory: int = MAX_MEMORY,
    max_file: int = MAX_FILE,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write a model with a LoRA adapter merged into its weights. All ranks call it together.

    Each weight becomes `weight + alpha / r * (B @ A)`. This is computed in single precision (in
    double precision if the base has it) and rounded once, to the base's dtype. Tensors that the
    adapter holds whole (PEFT's `modules_to_save`, biases) replace the base's tensors.

    Args:
        base: the checkpoint that the adapter was trained on, in any format.
        adapter: a directory that PEFT saved; or any checkpoint with tensors `NAME.lora_A` and
            `NAME.lora_B` (upper or lower case, with or without `.weight`), where NAME is the end
            of a module's name in the base.
        target: a new directory.
        alpha: the LoRA alpha. Default: `lora_alpha` of PEFT's `adapter_config.json`.
        to, only, skip, root, dtype, config, verify, spec, format, max_memory, max_file, group,
            on_event: as for `export`. `spec` and `format` apply to the base.

    Raises:
        MismatchError: the adapter does not fit the base; `problems` lists all names.
        CheckpointExistsError, StateError, CorruptionError: as for `export`.
    """
    options = ExportOptions(
        target=target,
        to=to,
        only=only,
        skip=skip,
        root=root,
        dtype=dtype,
        config=config,
        verify=verify,
        max_memory=max_memory,
        max_file=max_file,
    )
    with pause_gc(), resolved_group(group) as ranks, ExitStack() as cleanup:
        job = _CombineJob(options, ranks, Recorder(on_event), cleanup)
        return job.merge(base, adapter, alpha, OpenOptions(spec=spec, format=format))


@dataclass(frozen=True, slots=True)
class _CombineJob:
    """One call of `average` or `merge_lora` on one rank.

    Attributes:
        cleanup: releases the locks of the job.
    """

    options: ExportOptions
    group: Group
    recorder: Recorder
    cleanup: ExitStack

    def average(
        self,
        places: Sequence[Place],
        weights: Sequence[float] | None,
        take_first: Sequence[str],
        reading: OpenOptions,
    ) -> ConversionReport:
        """Write the weighted average of several checkpoints."""

        def check_options() -> None:
            Selection.from_patterns(take_first, ())
            if isinstance(places, str) or len(places) < 2:
                raise StateError(f"places={places!r}: expected a list of two or more checkpoints")
            normalize_weights(weights, len(places))

        run_on_all(self.group, "checking options", check_options)
        identity = f"{weights}, {take_first}"
        with self.recorder.stage("open"):
            opened = [
                self._open(place, f"{identity}, {index}", reading)
                for index, place in enumerate(places)
            ]
        by_path = {str(each.store): each for each in opened}
        if len({_resolve_place(each.store) for each in opened}) < len(opened):
            raise StateError(
                f"places= has a checkpoint twice ({', '.join(map(str, places))}): pass each one "
                "once, and use weights= to give it a larger weight"
            )
        selection = Selection.from_patterns(self.options.only, self.options.skip)
        manifests = {path: each.manifest for path, each in by_path.items()}
        manifest, left_out = average_manifests(manifests, selection, take_first)

        def open_source(arena: Arena) -> Source:
            sources = {
                path: CheckpointSource(each, arena, verify=self.options.verify)
                for path, each in by_path.items()
            }
            normalized = normalize_weights(weights, len(sources))
            max_bytes = chunk_size(self.options.max_memory)
            return AverageSource(sources, normalized, take_first, max_bytes)

        source_id = f"average {[digest_source(each) for each in opened]}, {identity}"
        left_out = (*left_out, *(line for each in opened for line in each.left_out))
        copies: CopiesToCompare = [(each, None) for each in opened]
        return self._write(manifest, open_source, copies, source_id, left_out)

    def merge(
        self, base: Place, adapter: Place, alpha: float | None, reading: OpenOptions
    ) -> ConversionReport:
        """Write a model with an adapter merged into it."""
        run_on_all(self.group, "checking options", partial(_check_alpha, alpha))
        with self.recorder.stage("open"):
            opened = self._open(base, f"{alpha}", reading)
            config = self._read_adapter_config(adapter)
            opened_adapter = self._open(
                partial(_adapter_weights, adapter), f"{alpha}", DEFAULT_OPTIONS
            )
        changes = self._find_changes(opened_adapter, opened, config, alpha)

        def open_source(arena: Arena) -> Source:
            base_source, adapter_source = (
                CheckpointSource(each, arena, verify=self.options.verify)
                for each in (opened, opened_adapter)
            )
            max_bytes = chunk_size(self.options.max_memory)
            return MergedSource(base_source, adapter_source, changes, max_bytes)

        digests = f"{digest_source(opened)}, {digest_source(opened_adapter)}"
        manifest = msgspec.structs.replace(opened.manifest, metrics={})
        adapter_names = [entry.name for entry in opened_adapter.manifest.tensors]
        copies: CopiesToCompare = [(opened, None), (opened_adapter, adapter_names)]
        left_out = (*opened.left_out, *opened_adapter.left_out)
        source_id = f"merge {digests}, {config}, {alpha}"
        return self._write(manifest, open_source, copies, source_id, left_out)

    def _find_changes(
        self, adapter: Opened, base: Opened, config: AdapterConfig | None, alpha: float | None
    ) -> dict[str, Change]:
        """Find the changes that an adapter makes, and add its path to errors."""
        root = self.options.root
        try:
            return find_changes(adapter.manifest, base.manifest, root, config, alpha)
        except StateError as error:
            raise StateError(f"{adapter.store}: {error}") from error
        except MismatchError as error:
            raise MismatchError(f"{adapter.store}: {error.summary}", error.problems) from error

    def _open(
        self, place: Place | Callable[[], Place], identity: str, reading: OpenOptions
    ) -> Opened:
        """Open a checkpoint, and lock it until the end of the job."""

        def find_store() -> Store:
            return open_store(place() if callable(place) else place)

        step_folder = find_step_directory(find_store, "newest", self.group)

        def get_store() -> Store:
            self.options.check()
            store = find_store().at(step_folder) if step_folder else find_store()
            if self.group.rank == 0:  # rank 0 leaves the job last
                self.cleanup.enter_context(store.hold(MANIFEST, shared=True))
            return store

        return open_any(get_store, self.group, f"{self.options.resume_key}, {identity}", reading)

    def _read_adapter_config(self, adapter: Place) -> AdapterConfig | None:
        """Read the PEFT configuration of an adapter on rank 0. Return None if it has none."""

        def read() -> bytes:
            folder = _adapter_folder(adapter)
            if ADAPTER_CONFIG not in folder.list():
                return b""
            return folder.read(ADAPTER_CONFIG, limit=LARGEST_CONFIG)

        encoded = run_on_first(self.group, f"reading {ADAPTER_CONFIG}", read)
        return decode_config(encoded, f"{adapter}: {ADAPTER_CONFIG}") if encoded else None

    def _write(
        self,
        manifest: Manifest,
        open_source: Callable[[Arena], Source],
        copies: CopiesToCompare,
        source_id: str,
        left_out: Sequence[str],
    ) -> ConversionReport:
        return write_export(
            self.options,
            manifest,
            open_source,
            copies,
            source_id,
            [*dict.fromkeys(left_out)],
            self.group,
            self.recorder,
        )


def _check_alpha(alpha: float | None) -> None:
    if alpha is None:
        return
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise StateError(f"alpha={alpha!r}: expected a finite number")


def _resolve_place(store: Files) -> str:
    """Return the place of a store with symbolic links resolved."""
    return str(resolve_links(store) if isinstance(store, Store) else store)


def _adapter_folder(adapter: Place) -> Store:
    """Return the directory of an adapter, which may be one file."""
    store = open_store(adapter)
    return (store.parent or store) if store.is_file() else store


def _adapter_weights(adapter: Place) -> Place:
    """Return the weights file of an adapter that PEFT saved. Return other checkpoints unchanged."""
    store = open_store(adapter)
    if store.is_file():
        return adapter
    names = store.list()
    found = [name for name in ADAPTER_WEIGHTS if name in names]
    return store.at(found[0]) if found else adapter
