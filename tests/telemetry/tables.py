"""Tables of telemetry with made-up numbers."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np

from shardwise.parts.telemetry.records import NOT_RUN, StageColumns, Telemetry


def table_of(ranks: range, world_size: int, **fields: object) -> Telemetry:
    """Return the telemetry of a save: stages `plan` on all ranks, and `write` on even ranks."""
    rank = np.array(ranks, np.int64)
    n = len(rank)
    is_even = rank % 2 == 0
    zeros = np.zeros(n, np.int64)
    plan = StageColumns("plan", 100 + rank, 50 + rank, zeros, zeros, 7 * rank, np.zeros(n, "S1"))
    write = StageColumns(
        "write",
        np.where(is_even, 1000 + rank, NOT_RUN),
        np.where(is_even, 10**6 + 13 * rank, 0),
        np.where(is_even, 2**30 + rank, 0),
        np.where(is_even, rank % 3, 0),
        zeros,
        np.array(
            [f"r{each:05d}-{'ab' * 8}.safetensors" if each % 2 == 0 else "" for each in ranks], "S"
        ),
    )
    hosts = sorted({each // 8 for each in ranks})
    values: dict[str, object] = {
        "operation": "save", "id": "ab" * 8, "step": 100, "path": "/runs/a/step-00000100",
        "started": "2026-11-27T04:05:06.000007+00:00", "seconds": 1.5 + max(ranks) / 1000,
        "world_size": world_size, "library": "1.2.3",
        "ranks": rank, "hosts": tuple(f"host-{each}" for each in hosts),
        "host": np.searchsorted(hosts, rank // 8).astype(np.int64),
        "axes": ("pp", "dp", "tp"),
        "coordinates": np.array([rank // 8 % 4, rank // 2 % 4, rank % 2], np.int64),
        "clock": 17 * rank - 40, "began": 3 * rank, "stages": (plan, write),
        "phases": {"read": 0.5 + max(ranks)},
    }  # fmt: skip
    return Telemetry(**{**values, **fields})  # type: ignore[arg-type]


def same(a: Telemetry, b: Telemetry) -> bool:
    """Whether two tables are equal in every field and column."""

    def plain(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.tolist()
        return [plain(each) for each in value] if isinstance(value, tuple | list) else value

    return plain(astuple(a)) == plain(astuple(b))
