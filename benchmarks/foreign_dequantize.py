"""The time and memory to load block FP8 and MXFP4 into bfloat16, on ranks that hold the rows.

Limit: a load of the same tensors from files of bfloat16, by the bytes that are read in a second.
The goal is at least 0.7 of it, and at most 300 MB beyond the target.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import shardwise as sw
from benchmarks.harness import Bench, Size, parse_arguments
from benchmarks.memory import peak_beyond

SIZE = Size(tensors=64)
LEAST, MOST = 0.7, 300
PLAIN = "bfloat16"
EXPERTS = 8


def main() -> None:
    bench = Bench("foreign_dequantize", SIZE, parse_arguments())
    columns = bench.size.columns
    rows = bench.size.nbytes // 2 // columns
    makers: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
        PLAIN: plain,
        "block FP8": block_fp8,
        "MXFP4": mxfp4,
    }
    for name, make in makers.items():
        if bench.rank == 0:
            write(bench.dir / name, make, bench.size.tensors, rows, columns)
    loads: dict[str, Callable[[], sw.LoadReport]] = {}
    for name in makers:
        shape = (EXPERTS, columns, rows // EXPERTS) if name == "MXFP4" else (rows, columns)
        loads[name] = partial(load, bench.dir / name, make_target(bench, shape))
    read: dict[str, int] = {}
    peaks = dict.fromkeys(loads, 0.0)
    for _ in bench.rounds:
        for name, job in loads.items():
            bench.drop_page_cache()
            bench.measure(f"cold: {name}", job)
        bench.fill_page_cache()
        for name, job in loads.items():
            report = bench.measure(f"warm: {name}", job)
            read[name] = sum(bench.gather_values(report.bytes_read))
            peaks[name] = max(peaks[name], peak_beyond(bench, f"peak: {name}", job))
    rates: list[dict[str, object]] = []
    for name in list(loads)[1:]:
        bytes_read = read[name] / read[PLAIN]
        row: dict[str, object] = {"scheme": name, "bytes read": round(bytes_read, 3)}
        for cache in ("cold", "warm"):
            bench.compare(f"{cache}: {PLAIN}", f"{cache}: {name}")
            rate = bytes_read / bench.ratio(f"{cache}: {name}", f"{cache}: {PLAIN}")
            row[f"{cache}: bytes read in a second"] = round(rate, 3)
            if name == "block FP8":
                bench.goal(f"{cache}: bytes read in a second, of {PLAIN}", rate, least=LEAST)
        rates.append(row)
    bench.table(f"Bytes read, and bytes read in a second, of those of {PLAIN}", rates)
    bench.table(
        "Peak memory of a process beyond the target",
        [{"scheme": name, "MB": peak} for name, peak in peaks.items()],
    )
    bench.goal("MB beyond the target, block FP8", peaks["block FP8"], most=MOST)
    bench.finish()


def plain(rows: int, columns: int) -> dict[str, Tensor]:
    return {"": torch.randn(rows, columns).bfloat16()}


def block_fp8(rows: int, columns: int) -> dict[str, Tensor]:
    weight = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
    return {"": weight, "_scale_inv": torch.rand(-(-rows // 128), -(-columns // 128)) + 0.01}


def mxfp4(rows: int, columns: int) -> dict[str, Tensor]:
    shape = (EXPERTS, rows // EXPERTS, columns // 32, 16)
    blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
    return {"_blocks": blocks, "_scales": torch.randint(100, 130, shape[:-1], dtype=torch.uint8)}


def write(
    place: Path,
    make: Callable[[int, int], dict[str, Tensor]],
    tensors: int,
    rows: int,
    columns: int,
) -> None:
    """Write a published model, all tensors of which have the same values."""
    place.mkdir()
    parts = make(rows, columns)
    files = {f"w{i}{end}": each.clone() for i in range(tensors) for end, each in parts.items()}
    save_file(files, place / "model.safetensors")


def make_target(bench: Bench, shape: tuple[int, ...]) -> dict[str, sw.Shards]:
    """Return this rank's part of all tensors along the first dimension."""
    n = shape[0] // bench.world
    box = sw.Box((bench.rank * n, *[0] * (len(shape) - 1)), (n, *shape[1:]))
    return {
        f"w{i}": sw.Shards(shape, torch.bfloat16, [(box, torch.ones(box.shape).bfloat16())])
        for i in range(bench.size.tensors)
    }


def load(place: Path, target: dict[str, sw.Shards]) -> sw.LoadReport:
    return sw.load(place, {"model": dict(target)}, dequantize=True)


if __name__ == "__main__":
    main()
