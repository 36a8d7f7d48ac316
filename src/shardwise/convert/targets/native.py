"""shardwise's own format: data files of bounded size, and a manifest."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import numpy as np

from shardwise.convert.plan import Chosen, Late, Output, Part, Sums, Target, Written, cut, split
from shardwise.manifest.checksums import BLOCK, crc32
from shardwise.manifest.datafile import DataFile, lay_out, list_pieces
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import (
    VERSION,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    encode_manifest,
)
from shardwise.manifest.names import MANIFEST, data_file


def native_target(chosen: Chosen) -> Target:
    """Plan the files of a shardwise checkpoint. Tensors larger than `max_file` are cut."""
    source, save_id = chosen.source, chosen.save_id
    stored = [each for each in chosen.tensors if each.entry.same_as is None]
    parts = [part for each in stored if each.part.size for part in cut(each.part, chosen.max_file)]
    # Wider types first, so that all tensors are aligned.
    order = sorted(parts, key=lambda part: -DTYPES[part.dtype].itemsize)
    files = split(order, lambda part: part.size, chosen.max_file)
    shapes = {each.entry.name: each.entry.shape for each in stored}
    outputs, layouts = [], []
    for rank, held in enumerate(files):
        metadata = {"shardwise": str(VERSION), "save_id": save_id, "rank": str(rank)}
        listed = list_pieces((p.name, p.dtype, shapes[p.name], p.box) for p in held)
        layout = lay_out(listed, 0, metadata)
        layouts.append(layout)
        outputs.append(_file(data_file(rank, save_id), layout, held))
    entries = _entries(chosen.tensors, files)

    def finals(sums: Mapping[str, Sums]) -> Mapping[str, bytes]:
        manifest = Manifest(
            save_id=save_id,
            step=source.step,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            world_size=len(files),
            metrics=source.metrics,
            files=tuple(
                FileEntry(
                    output.name,
                    rank,
                    layout.size,
                    layout.data_at,
                    layout.objects_at,
                    layout.checksums_at,
                    crc32(_table(sums[output.name])),
                )
                for rank, (output, layout) in enumerate(zip(outputs, layouts, strict=True))
            ),
            objects=source.objects,
            tensors=entries,
        )
        return {MANIFEST: encode_manifest(manifest)}

    left = tuple(f"{name}: its value differs between ranks" for name in source.per_rank)
    return Target(tuple(outputs), finals, left)


def _file(name: str, layout: DataFile, parts: Sequence[Part]) -> Output:
    marks = (*range(BLOCK, layout.checksums_at, BLOCK), layout.checksums_at)
    table = Late(layout.size - layout.checksums_at, lambda sums: _table([*sums, 0]))
    return Output(name, (layout.header, *parts, table), marks)


def _table(sums: Sums) -> bytes:
    """Return the checksums of all blocks before the table itself."""
    return np.array(sums[:-1], "<u4").tobytes()


def _entries(
    tensors: Sequence[Written], files: Sequence[Sequence[Part]]
) -> tuple[TensorEntry, ...]:
    pieces: dict[str, list[PieceEntry]] = {}
    for number, held in enumerate(files):
        at = 0
        for part in held:
            piece = PieceEntry(number, at, part.box.offset, part.box.shape)
            pieces.setdefault(part.name, []).append(piece)
            at += part.size
    return tuple(
        TensorEntry(
            each.entry.name,
            each.dtype,
            each.entry.shape,
            tuple(pieces.get(each.entry.name, ())),
            each.entry.same_as,
        )
        for each in tensors
    )
