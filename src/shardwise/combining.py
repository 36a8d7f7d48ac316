"""`average` and `merge_lora`: write one checkpoint made from several, in bounded memory."""

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
from shardwise.convert.average import Averaged, averaged, checked_weights
from shardwise.convert.export import (
    MAX_FILE,
    MAX_MEMORY,
    ExportOptions,
    digest_of,
    write_export,
)
from shardwise.convert.lora import AdapterConfig, changes, decode_config
from shardwise.convert.merge import Merged
from shardwise.convert.plan import Parts
from shardwise.convert.stream import Source
from shardwise.convert.write import Compared, ConversionReport, largest_read
from shardwise.engine.buffers import Arena
from shardwise.engine.calls import without_collection
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import StateError
from shardwise.events import Recorder, Sink
from shardwise.formats.specification import Specification
from shardwise.manifest.manifest import Manifest
from shardwise.manifest.names import MANIFEST
from shardwise.opening import PLAIN, OpenOptions, open_any, place_below
from shardwise.state.selection import Selection
from shardwise.store import Files, LocalStore, Store, local_path, open_store

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
    format: str | None = None,  # noqa: A002 - as it is called everywhere
    max_memory: int = MAX_MEMORY,
    max_file: int = MAX_FILE,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write the weighted mean of several checkpoints. All ranks call it and share the work.

    Floating-point tensors are averaged in double precision and rounded once, to the dtype of the
    first checkpoint. Other tensors must be equal in all checkpoints. Plain values that differ are
    left out. The result has no metrics; it has a step only if all checkpoints have the same step.

    Args:
        places: two or more checkpoints with the same names and shapes, in any formats. For the
            root of a run, its newest checkpoint is read.
        weights: one number per checkpoint; only their ratios matter. Default: equal weights.
        take_first: shell patterns; matching names are taken from the first checkpoint.
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
    with without_collection(), resolved_group(group) as ranks, ExitStack() as cleanup:
        job = _Job(options, ranks, Recorder(on_event), cleanup)
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
    format: str | None = None,  # noqa: A002 - as it is called everywhere
    max_memory: int = MAX_MEMORY,
    max_file: int = MAX_FILE,
    group: dist.ProcessGroup | Group | None = None,
    on_event: Sink | None = None,
) -> ConversionReport:
    """Write a model with a LoRA adapter merged into its weights. All ranks call it together.

    Each weight becomes `weight + alpha / r * (B @ A)`. This is computed in single precision (in
    double precision if the base has it) and rounded once, to the base's dtype. Tensors that the
    adapter holds whole (PEFT's `modules_to_save`, biases) replace those of the base.

    Args:
        base: the checkpoint that the adapter was trained on, in any format.
        adapter: a directory that PEFT saved; or any checkpoint with tensors `….lora_A` and
            `….lora_B` (upper or lower case, with or without `.weight`) whose names end like the
            base's names.
        alpha: the LoRA alpha. Default: `lora_alpha` of PEFT's `adapter_config.json`.
        to, only, skip, root, dtype, config, verify, spec, format, max_memory, max_file, group,
            on_event: as for `export`. They apply to the base, whose model is below `root`.

    Raises:
        MismatchError: the adapter does not fit the base; `.problems` lists all names.
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
    with without_collection(), resolved_group(group) as ranks, ExitStack() as cleanup:
        job = _Job(options, ranks, Recorder(on_event), cleanup)
        return job.merge(base, adapter, alpha, OpenOptions(spec=spec, format=format))


@dataclass(frozen=True, slots=True)
class _Job:
    """One call of `average` or `merge_lora` on one rank."""

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
        """Write the weighted mean of several checkpoints."""

        def check() -> None:
            Selection.by(take_first, ())
            if isinstance(places, str) or len(places) < 2:
                raise StateError(f"places={places!r}: expected a list of two or more checkpoints")
            checked_weights(weights, len(places))

        identity = f"{weights}, {take_first}"
        self._agree(check)
        with self.recorder.stage("open"):
            opened = [
                self._open(place, f"{identity}, {i}", reading) for i, place in enumerate(places)
            ]
        found = {str(each.store): each for each in opened}
        if len({_real(each.store) for each in opened}) < len(opened):
            raise StateError(
                "places= has the same checkpoint twice: use weights= to give it a larger weight"
            )
        selection = Selection.by(self.options.only, self.options.skip)
        manifests = {name: each.manifest for name, each in found.items()}
        manifest, left_out = averaged(manifests, selection, take_first)

        def source(arena: Arena) -> Parts:
            sources = {
                n: Source(each, arena, verify=self.options.verify) for n, each in found.items()
            }
            shares = checked_weights(weights, len(sources))
            return Averaged(sources, shares, take_first, largest_read(self.options.max_memory))

        source_id = f"average {[digest_of(each) for each in opened]}, {identity}"
        left = [*left_out, *(line for each in opened for line in each.left_out)]
        compared: Compared = [(each, None) for each in opened]
        return self._write(manifest, source, compared, source_id, left)

    def merge(
        self, base: Place, adapter: Place, alpha: float | None, reading: OpenOptions
    ) -> ConversionReport:
        """Write a model with an adapter merged into it."""
        self._agree(partial(_check_alpha, alpha))
        with self.recorder.stage("open"):
            opened = self._open(base, f"{alpha}", reading)
            config = self._adapter_config(adapter)
            added = self._open(partial(_weights_at, adapter), f"{alpha}", PLAIN)
        changed = changes(added.manifest, opened.manifest, self.options.root, config, alpha)

        def source(arena: Arena) -> Parts:
            ours, theirs = (
                Source(each, arena, verify=self.options.verify) for each in (opened, added)
            )
            return Merged(ours, theirs, changed, largest_read(self.options.max_memory))

        source_id = f"merge {digest_of(opened)}, {digest_of(added)}, {config}, {alpha}"
        manifest = msgspec.structs.replace(opened.manifest, metrics={})
        compared: Compared = [(opened, None), (added, [e.name for e in added.manifest.tensors])]
        left = [*opened.left_out, *added.left_out]
        return self._write(manifest, source, compared, source_id, left)

    def _agree(self, check: Callable[[], None]) -> None:
        """Run a check on all ranks. An error on one rank is raised on all."""

        def speak() -> bytes:
            check()
            return b""

        exchange(self.group, "checking options", speak, lambda _: b"")

    def _open(
        self, place: Place | Callable[[], Place], identity: str, reading: OpenOptions
    ) -> Opened:
        def find() -> Store:
            return open_store(place() if callable(place) else place)

        below = place_below(find, "newest", self.group)

        def enter() -> Store:
            self.options.check()
            store = find().at(below) if below else find()
            self.cleanup.enter_context(store.hold(MANIFEST, shared=True))
            return store

        return open_any(enter, self.group, f"{self.options.identity}, {identity}", reading)

    def _adapter_config(self, adapter: Place) -> AdapterConfig | None:
        """Return the PEFT configuration of an adapter, read by rank 0; None if it has none."""

        def answer(_: list[bytes]) -> bytes:
            folder = _folder_of(adapter)
            if folder is None or ADAPTER_CONFIG not in folder.list():
                return b""
            return folder.read(ADAPTER_CONFIG, limit=LARGEST_CONFIG)

        data = exchange(self.group, f"reading {ADAPTER_CONFIG}", lambda: b"", answer)
        return decode_config(data, f"{adapter}: {ADAPTER_CONFIG}") if data else None

    def _write(
        self,
        manifest: Manifest,
        source: Callable[[Arena], Parts],
        compared: Compared,
        source_id: str,
        left_out: Sequence[str],
    ) -> ConversionReport:
        left = [*dict.fromkeys(left_out)]
        return write_export(
            self.options, manifest, source, compared, source_id, left, self.group, self.recorder
        )


def _check_alpha(alpha: float | None) -> None:
    if alpha is None:
        return
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise StateError(f"alpha={alpha!r}: expected a finite number")


def _real(store: Files) -> str:
    """Return the path of a store with symbolic links resolved."""
    path = local_path(store)
    return str(store if path is None else path.resolve())


def _folder_of(adapter: Place) -> LocalStore | None:
    """Return the directory of an adapter; None if it is not in a file system."""
    path = local_path(open_store(adapter))
    if path is None:
        return None
    return LocalStore(path.parent if path.is_file() else path)


def _weights_at(adapter: Place) -> Place:
    """Return the weights file of an adapter that PEFT saved, or else the place itself."""
    store = open_store(adapter)
    path = local_path(store)
    if path is not None and path.is_dir():
        found = [name for name in ADAPTER_WEIGHTS if name in store.list()]
        return path / found[0] if found else adapter
    return adapter
