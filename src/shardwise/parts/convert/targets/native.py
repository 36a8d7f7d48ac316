"""Plan checkpoints of shardwise: data files of bounded size, and a manifest."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from shardwise.kernel.manifest.checksums import BLOCK, crc32
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    encode_header_entries,
    encode_manifest,
    lay_out_file,
)
from shardwise.kernel.manifest.pieces import encode_tensors_with
from shardwise.parts.convert.plan import (
    BytesFromChecksums,
    ExportContents,
    ExportFiles,
    OutputFile,
    RangeChecksums,
    TargetTensor,
    TensorPart,
    divide_among_files,
    split_rows,
)


def plan_native_files(contents: ExportContents) -> ExportFiles:
    """Plan the files of a shardwise checkpoint. Tensors larger than `max_file` are cut."""
    source, save_id = contents.source, contents.save_id
    stored = [each for each in contents.tensors if each.entry.same_as is None]
    parts = [
        part
        for each in stored
        if each.part.size
        for part in split_rows(each.part, contents.max_file)
    ]
    # Larger elements first, so that all tensors are aligned.
    sorted_parts = sorted(parts, key=lambda part: -DTYPES[part.dtype].itemsize)
    files = divide_among_files(sorted_parts, lambda part: part.size, contents.max_file)
    shapes = {each.entry.name: each.entry.shape for each in stored}
    tensor_files, entries = [], []
    for rank, file_parts in enumerate(files):
        pieces = encode_header_entries(
            (part.name, part.dtype, shapes[part.name], part.box) for part in file_parts
        )
        header, entry = lay_out_file(save_id, rank, pieces)
        entries.append(entry)
        tensor_files.append(_plan_file(header, entry, file_parts))
    tensors = _encode_tensors(contents.tensors, files)
    left_out = tuple(f"{name}: its value differs between ranks" for name in source.per_rank)

    def make_index_files(sums: Mapping[str, RangeChecksums]) -> Mapping[str, bytes]:
        manifest = Manifest(
            save_id=save_id,
            step=source.step,
            created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            world_size=len(files),
            metrics=dict(source.metrics),
            left_out=(*source.left_out, *left_out),
            files=tuple(
                msgspec.structs.replace(
                    entry, checksums_crc32=crc32(_encode_checksums(sums[entry.name]))
                )
                for entry in entries
            ),
            objects=source.objects,
            tensors=tensors,
        )
        return {MANIFEST: encode_manifest(manifest)}

    return ExportFiles(tuple(tensor_files), make_index_files, left_out)


def _plan_file(header: bytes, entry: FileEntry, parts: Sequence[TensorPart]) -> OutputFile:
    checksum_boundaries = (*range(BLOCK, entry.checksums_at, BLOCK), entry.checksums_at)
    table = BytesFromChecksums(
        entry.size - entry.checksums_at, lambda sums: _encode_checksums([*sums, 0])
    )
    return OutputFile(entry.name, (header, *parts, table), checksum_boundaries)


def _encode_checksums(sums: RangeChecksums) -> bytes:
    """Encode the checksums of all blocks. The last checksum, of the table itself, is left out."""
    return np.array(sums[:-1], "<u4").tobytes()


def _encode_tensors(
    tensors: Sequence[TargetTensor], files: Sequence[Sequence[TensorPart]]
) -> msgspec.Raw:
    index = {each.entry.name: i for i, each in enumerate(tensors)}
    rows = []
    for file, parts in enumerate(files):
        start = 0
        for part in parts:
            rows.append((index[part.name], file, start, part.box.offset, part.box.shape))
            start += part.size
    entries = [msgspec.structs.replace(each.entry, dtype=each.dtype) for each in tensors]
    return encode_tensors_with(entries, rows)
