"""The contents of a checkpoint that DCP saved: what each rank wrote, and the manifest of all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isfinite

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardwise.adapters.tensors import check_dtype
from shardwise.engine.options import SaveOptions
from shardwise.errors import FormatError, LayoutError, MismatchError, StateError
from shardwise.integrations.dcp.names import FlatState, NamedState, name_state
from shardwise.layout import Box
from shardwise.layout.columns import padded_rows
from shardwise.manifest.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    TensorEntry,
    TensorWithPieces,
)
from shardwise.manifest.pieces import add_pieces
from shardwise.manifest.validate import layout_of_manifest
from shardwise.state.plain_values import JsonValue


@dataclass(frozen=True, slots=True)
class WrittenPiece:
    """A piece that a rank wrote.

    Attributes:
        tensor: DCP's name of the tensor, or the name of a tensor inside a value.
        dtype: torch's name of the dtype.
        shape: the global shape of the tensor.
        box: the box of the piece.
        start: the first byte of the piece in the data section of the file.
        file: the file.
        place: the path or URL of the checkpoint, as the rank knows it.
    """

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    start: int
    file: FileEntry
    place: str


@dataclass(frozen=True, slots=True)
class WrittenValue:
    """A plain value that a rank saves.

    Attributes:
        name: DCP's name of the value.
        value: the value, if it contains no tensors.
        encoded: the encoded value, if it contains tensors.
        tensors: the names, dtypes and shapes of the tensors in the value.
        pieces: the pieces of these tensors; an empty tensor has none.
    """

    name: str
    value: object = None
    encoded: JsonValue = None
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    pieces: tuple[WrittenPiece, ...] = ()


Written = WrittenPiece | WrittenValue | None
"""The `storage_data` of a write result; None for an empty chunk of a tensor."""


def make_manifest(
    metadata: Metadata,
    written: Iterable[Written],
    options: SaveOptions,
    *,
    place: str,
    save_id: str,
    world_size: int,
    allow_pickle: bool,
) -> Manifest:
    """Return the manifest of a checkpoint that all ranks have written.

    Args:
        metadata: the tensors and values, as the planner describes them.
        written: the pieces and values of all ranks.
        options: the step and the metrics.
        place: the path or URL of the checkpoint.
        save_id: the id of the save.
        world_size: the number of ranks.
        allow_pickle: pickle values that have no plain form.

    Raises:
        StateError: a value has no plain form, or a name is not allowed.
        MismatchError: the chunks of a tensor have different dtypes, or ranks saved elsewhere.
        LayoutError: the chunks of a tensor leave gaps or overlap.
    """
    items = [each for each in written if each is not None]
    values = [each for each in items if isinstance(each, WrittenValue)]
    pieces = [each for each in items if isinstance(each, WrittenPiece)]
    tensors = _tensors_of(metadata, pieces)
    named = _name_contents(metadata, tensors, values, allow_pickle=allow_pickle)
    entries = {name: TensorEntry(named.tensor_names[name], *tensors[name]) for name in tensors}
    for value in values:
        entries |= {name: TensorEntry(name, dtype, shape) for name, dtype, shape in value.tensors}
        pieces += value.pieces
    _refuse_other_places(pieces, place)
    files = sorted({each.file.name: each.file for each in pieces}.values(), key=lambda f: f.rank)
    manifest = Manifest(
        save_id=save_id,
        step=options.step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=world_size,
        metrics={
            name: value if isfinite(value) else None for name, value in options.metrics.items()
        },
        files=tuple(files),
        objects=tuple(ObjectEntry(name, value) for name, value in named.objects.items()),
        tensors=_entries_with_pieces(entries, pieces, files),
    )
    try:
        layout_of_manifest(manifest)
    except FormatError as error:
        raise LayoutError(
            f"{error}: every element of a tensor must be saved by exactly one rank: call save on "
            "all ranks that hold shards, and without no_dist"
        ) from error
    return manifest


def _refuse_other_places(pieces: Iterable[WrittenPiece], place: str) -> None:
    place_of_rank = {each.file.rank: each.place for each in pieces if each.place != place}
    if place_of_rank:
        raise MismatchError(
            f"ranks do not save to the same place; rank 0 saves to {place}. Pass the same "
            "checkpoint_id on all ranks; if it contains a time, broadcast it from rank 0:",
            [f"rank {rank}: {place_of_rank[rank]}" for rank in sorted(place_of_rank)],
        )


def _name_contents(
    metadata: Metadata,
    tensors: Collection[str],
    values: Sequence[WrittenValue],
    *,
    allow_pickle: bool,
) -> NamedState:
    paths = metadata.planner_data or {}
    state = FlatState(
        tensors,
        {each.name: each.value for each in values if not each.tensors},
        {each.name: each.encoded for each in values if each.tensors},
        {name: paths[name] for name in metadata.state_dict_metadata if name in paths},
    )
    return name_state(state, allow_pickle=allow_pickle)


def _tensors_of(
    metadata: Metadata, pieces: Sequence[WrittenPiece]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and the global shape of each tensor, by DCP's name."""
    dtypes: dict[str, str] = {}
    problems = [
        f"{piece.tensor}: {piece.dtype} at {list(piece.box.offset)}, {dtypes[piece.tensor]} before"
        for piece in pieces
        if dtypes.setdefault(piece.tensor, piece.dtype) != piece.dtype
    ]
    if problems:
        raise MismatchError(
            "the planner resolved chunks of one tensor to several dtypes:", problems
        )
    return {
        name: (dtypes.get(name) or check_dtype(name, entry.properties.dtype), tuple(entry.size))
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _entries_with_pieces(
    entries: Mapping[str, TensorEntry], pieces: Sequence[WrittenPiece], files: Sequence[FileEntry]
) -> tuple[TensorWithPieces, ...]:
    """Return the entries of the tensors, with their pieces."""
    index_of = {name: i for i, name in enumerate(entries)}
    file_index = {file.name: i for i, file in enumerate(files)}
    unknown = [each.tensor for each in pieces if each.tensor not in index_of]
    if unknown:
        raise StateError(
            f"{unknown[0]}: the planner wrote this tensor, but its metadata lacks it: correct the "
            "planner's create_global_plan"
        )
    dims = max((len(entry.shape) for entry in entries.values()), default=0)
    tensor = np.array([index_of[each.tensor] for each in pieces], np.int64)
    offset = padded_rows([each.box.offset for each in pieces], dims, 0)
    columns = (
        tensor,
        np.array([file_index[each.file.name] for each in pieces], np.int64),
        np.array([each.start for each in pieces], np.int64),
        offset,
        padded_rows([each.box.shape for each in pieces], dims, 1),
    )
    order = np.lexsort([*reversed(offset.T), tensor])
    return tuple(add_pieces([*entries.values()], *(column[order] for column in columns)))
