"""The manifest of a very large run: its size, and the cost of opening it and planning one load.

The state is Llama-3.1-405B in fp32 with AdamW, of 3 × 1,137 tensors, split over tensor-, pipeline-
and data-parallel ranks. Pieces are made by rule, as the planner makes them.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwise.boxes.box import IntArray
from shardwise.manifest.checksums import block_count
from shardwise.manifest.data_files import FileTable
from shardwise.manifest.manifest import Manifest, TensorEntry, decode_manifest, encode_manifest
from shardwise.manifest.pieces import Runs, encode_tensors
from shardwise.manifest.validate import layout_of_manifest
from shardwise.plan.load import plan_load

SCALES = {64: (8, 1, 8), 1024: (8, 16, 8), 16384: (8, 16, 128), 131072: (8, 16, 1024)}
"""For each number of ranks, the sizes of TP, PP and DP."""
LAYERS, HIDDEN, FFN, KV, VOCAB = 126, 16384, 53248, 1024, 128256
SAVE_ID = "0123456789abcdef"
DATA_AT = 4096 * 40
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")


def tensors(layers: int = LAYERS) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """Yield the name, shape, TP dimension (None: replicated) and layer of each parameter."""
    yield "embed_tokens.weight", (VOCAB, HIDDEN), 0, 0
    for i in range(layers):
        for name, shape, dim in (
            ("attention_norm", (HIDDEN,), None),
            ("attention.wq", (HIDDEN, HIDDEN), 0),
            ("attention.wk", (KV, HIDDEN), 0),
            ("attention.wv", (KV, HIDDEN), 0),
            ("attention.wo", (HIDDEN, HIDDEN), 1),
            ("ffn_norm", (HIDDEN,), None),
            ("feed_forward.w1", (FFN, HIDDEN), 0),
            ("feed_forward.w2", (HIDDEN, FFN), 1),
            ("feed_forward.w3", (FFN, HIDDEN), 0),
        ):
            yield f"layers.{i}.{name}.weight", shape, dim, i
    yield "norm.weight", (HIDDEN,), None, layers - 1
    yield "output.weight", (VOCAB, HIDDEN), 0, layers - 1


@dataclass
class Plan:
    """Columns of runs with two axes, DP and TP, and the number of data bytes of each file."""

    entries: list[TensorEntry]
    rows: list[list[int]]
    data: IntArray


def plan_by_rule(tp: int, pp: int, dp: int) -> Plan:
    """Lay out all files. Ranks are numbered (PP, DP, TP), TP fastest."""
    entries, rows = [], []
    data = np.zeros((pp, dp, tp), np.int64)
    for kind in KINDS:
        for name, shape, dim, layer in tensors():
            index = len(entries)
            entries.append(TensorEntry(f"{kind}.{name}", "float32", shape))
            stage = min(layer * pp // LAYERS, pp - 1)
            add_tensor(rows, data[stage], (index, stage * dp * tp, shape, dim), (tp, dp))
    return Plan(entries, rows, data.reshape(-1))


def add_tensor(
    rows: list[list[int]],
    data: IntArray,
    tensor: tuple[int, int, tuple[int, ...], int | None],
    sizes: tuple[int, int],
) -> None:
    """Append the runs of one tensor, and add its bytes to the files of its stage, `(dp, tp)`.

    Within a TP part, dimension 0 is split over DP in chunks of equal size, the last one smaller, as
    torch does. Replicas over TP are written by TP rank 0.
    """
    index, first_file, shape, dim = tensor
    tp, dp = sizes
    parts = tp if dim is not None else 1
    row = 1 if len(shape) == 1 else shape[1]
    height = shape[0] // parts if dim == 0 else shape[0]
    width = row // parts if dim == 1 else row
    chunk = -(-height // dp)
    full, rest = divmod(height, chunk)
    for begin, count, size in ((0, full, chunk), (full, 1, rest)):
        # Ranks whose earlier pieces differ have other offsets in their files.
        starts = data[begin : begin + count]
        for low, high in equal_rows(starts[:, :parts]) if size else ():
            groups = [slice(0, parts)] if len({*starts[low, :parts].tolist()}) == 1 else None
            for group in groups or [slice(0, 1), slice(1, parts)]:
                first = group.start
                offset = [
                    first * height * (dim == 0) + (begin + low) * chunk,
                    first * width * (dim == 1),
                ]
                extent = [size, width]
                steps = [[chunk, 0], [height * (dim == 0), width * (dim == 1)]]
                if len(shape) == 1:
                    offset, extent, steps = [offset[0], 0], [size, 1], [[chunk, 0], [0, 0]]
                file = first_file + (begin + low) * tp + first
                counts = [high - low, group.stop - group.start]
                start = int(starts[low, first])
                rows.append([index, file, start, *offset, *extent, *counts, *steps[0], *steps[1]])
        starts[:, :parts] += size * width * 4


def equal_rows(starts: IntArray) -> Iterator[tuple[int, int]]:
    """Yield ranges of equal rows."""
    if not len(starts):
        return
    changes = (np.flatnonzero((np.diff(starts, axis=0) != 0).any(axis=1)) + 1).tolist()
    yield from zip([0, *changes], [*changes, len(starts)], strict=True)


def runs_of(plan: Plan, tp: int) -> Runs:
    """Return the runs of a plan."""
    table = np.array(plan.rows, np.int64)
    tensor, file, start = table[:, :3].T
    n = len(table)
    return Runs(
        tensor=tensor,
        file=file,
        start=start,
        offset=table[:, 3:5],
        shape=table[:, 5:7],
        count=table[:, 7:9],
        file_step=np.tile([tp, 1], (n, 1)),
        start_step=np.zeros((n, 2), np.int64),
        offset_step=table[:, 9:].reshape(n, 2, 2),
    )


def manifest_of(ranks: int) -> bytes:
    """Return the manifest of a save from this many ranks."""
    tp, pp, dp = SCALES[ranks]
    plan = plan_by_rule(tp, pp, dp)
    objects_at = DATA_AT + plan.data
    checksums_at = objects_at + 40
    size = checksums_at + 4 * block_count(checksums_at)
    crc32 = np.random.default_rng(0).integers(2**32, size=ranks)
    rank, data_at = np.arange(ranks), np.full(ranks, DATA_AT)
    columns = [rank, size, data_at, objects_at, checksums_at, crc32]
    encoded = encode_tensors(plan.entries, runs_of(plan, tp))
    manifest = Manifest(
        save_id=SAVE_ID,
        step=1,
        created="2026-01-01T00:00:00+00:00",
        world_size=ranks,
        per_rank=("rng",),
        files=FileTable(SAVE_ID, np.column_stack(columns)),
        objects=(),
        tensors=encoded,
    )
    return encode_manifest(manifest)


def wanted_of(entries: tuple[TensorEntry, ...], ranks: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the boxes of a middle rank after a change to TP 4 and PP 8, with the rest in DP."""
    tp, pp = 4, 8
    dp = max(1, ranks // tp // pp)
    i, j, stage = tp // 2, dp // 2, pp // 2
    shard = {f"{kind}.{name}": (dim, layer) for kind in KINDS for name, _, dim, layer in tensors()}
    found = []
    for index, entry in enumerate(entries):
        dim, layer = shard[entry.name]
        if layer * pp // LAYERS != stage:
            continue
        low, high = [0] * 2, [*entry.shape, 1][:2]
        if dim is not None:
            part = high[dim] // tp
            low[dim], high[dim] = i * part, (i + 1) * part
        chunk = -(-(high[0] - low[0]) // dp)
        low[0], high[0] = min(low[0] + j * chunk, high[0]), min(low[0] + (j + 1) * chunk, high[0])
        if high[0] > low[0]:
            found.append([index, *low, high[0] - low[0], high[1] - low[1]])
    table = np.array(found, np.int64)
    return table[:, 0], table[:, 1:3], table[:, 3:5]


def measure(ranks: int) -> dict[str, float]:
    """Return the figures of one scale."""
    start = time.process_time()
    data = manifest_of(ranks)
    made = time.process_time()
    before = peak()
    layout = layout_of_manifest(decode_manifest(data))
    opened = time.process_time()
    wanted = wanted_of(layout.tensors, ranks)
    ready = time.process_time()
    transfers, spans = plan_load(layout, wanted, largest_read=32 << 20)
    planned = time.process_time()
    return {
        "ranks": ranks,
        "pieces": int(layout.piece_counts.sum()),
        "runs": len(layout.runs),
        "manifest, MB": round(len(data) / 1e6, 2),
        "make, s": round(made - start, 3),
        "open, s": round(opened - made, 3),
        "plan, s": round(planned - ready, 3),
        "peak before opening, MB": round(before, 1),
        "peak, MB": round(peak(), 1),
        "boxes": len(wanted[0]),
        "transfers": len(transfers),
        "spans": len(spans),
    }


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main() -> None:
    """Print the figures of one scale, each in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("ranks", type=int, choices=[*SCALES])
    sys.stdout.write(msgspec.json.encode(measure(parser.parse_args().ranks)).decode() + "\n")


if __name__ == "__main__":
    main()
