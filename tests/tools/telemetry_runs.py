"""Synthetic telemetry of saves and restores, with ranks that are slow on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import shardwise as sw
from shardwise.kernel.store import open_store
from shardwise.parts.telemetry.files import write_of_save, write_operation
from shardwise.parts.telemetry.records import NOT_RUN, StageColumns, Telemetry

SECONDS = {"describe": 0.12, "plan": 0.3, "write": 8.0, "publish": 0.4}
"""The stages of a save, with the seconds that a rank usually needs."""
RESTORE = {"open": 0.2, "match": 0.1, "plan": 0.2, "read": 5.0, "restore": 0.3}
GIB = 2**30


def save_of(
    ranks: int,
    *,
    step: int | None = 100,
    seconds: Mapping[str, float] = SECONDS,
    slow: Mapping[str, Mapping[int, float]] | None = None,
    ranks_of_host: int = 8,
    axes: Mapping[str, int] | None = None,
    missing: Sequence[int] = (),
    nbytes: int = 4 * GIB,
    retries: Mapping[int, int] | None = None,
    seed: int = 0,
    noise: float = 0.04,
    operation: str = "save",
    started: str = "2026-11-27T03:12:44+00:00",
    phases: Mapping[str, float] | None = None,
    host: str = "node-{:04d}",
) -> Telemetry:
    """Return the telemetry of an operation.

    Args:
        ranks: the number of ranks of the operation.
        seconds: by stage, in the order in which they run, what a rank usually needs.
        slow: by stage and rank, by how many times longer that rank needs.
        axes: the sizes of the mesh of ranks, outermost first.
        missing: ranks without a record.
        nbytes: what each rank writes or reads.
        retries: by rank, the repeated requests of `write`.
        noise: how much ranks differ by chance, in fractions.
    """
    random = np.random.default_rng(seed)
    began = random.integers(0, 20_000, ranks)
    began -= began.min()
    now, stages = began.astype(float), []
    for name, usual in seconds.items():
        own = usual * 1e6 * (1 + noise * np.abs(random.standard_normal(ranks)))
        for rank, factor in (slow or {}).get(name, {}).items():
            own[rank] = usual * 1e6 * factor
        moves = name in ("write", "read")
        # All ranks end a stage together, as in a round; the last one that moves bytes is free.
        end = now + own if moves else np.full(ranks, (now + own).max())
        zeros = np.zeros(ranks, np.int64)
        files = [f"r{rank:05d}-8bceb852b7642b03.safetensors" for rank in range(ranks)]
        repeated = np.array([(retries or {}).get(rank, 0) for rank in range(ranks)])
        stages.append(
            StageColumns(
                name=name,
                start=now.astype(np.int64),
                duration=(end - now).astype(np.int64),
                bytes=np.full(ranks, nbytes, np.int64) if moves else zeros,
                retries=repeated if moves else zeros,
                waited=(end - now - own).astype(np.int64),
                file=np.array(files if moves else [""] * ranks, "S35"),
            )
        )
        now = end
    shape = tuple((axes or {}).values())
    coordinates = np.array(np.unravel_index(np.arange(ranks), shape)) if shape else ()
    whole = Telemetry(
        operation=operation,
        id="8bceb852b7642b03",
        step=step,
        path=f"runs/a/step-{step or 0:08d}",
        started=started,
        seconds=float(now.max()) / 1e6,
        world_size=ranks,
        library="0.1.0",
        ranks=np.arange(ranks),
        hosts=tuple(host.format(at) for at in range(-(-ranks // ranks_of_host))),
        host=np.arange(ranks) // ranks_of_host,
        axes=tuple(axes or ()),
        coordinates=np.array(coordinates, np.int64).reshape(len(shape), ranks),
        clock=np.zeros(ranks, np.int64),
        began=began,
        stages=tuple(stages),
        phases=dict(phases or {}),
    )
    return without_ranks(whole, missing) if missing else whole


def save_with_one_stage(
    own: Sequence[float], *, total: float, waited: Sequence[float] = ()
) -> Telemetry:
    """Return a save of which each rank writes for so many seconds, without waiting."""
    n = len(own)
    table = save_of(n, seconds={"write": 1.0}, noise=0, ranks_of_host=1)
    waits = np.array(waited or [0.0] * n)
    (stage,) = table.stages
    columns = {
        "duration": ((np.array(own) + waits) * 1e6).astype(np.int64),
        "waited": (waits * 1e6).astype(np.int64),
    }
    return replace(table, seconds=total, stages=(replace(stage, **columns),))


def without_ranks(whole: Telemetry, missing: Sequence[int]) -> Telemetry:
    """Return the telemetry without the records of some ranks."""
    kept = ~np.isin(whole.ranks, missing)
    columns = ("start", "duration", "bytes", "retries", "waited", "file")
    return replace(
        whole,
        **{name: getattr(whole, name)[kept] for name in ("ranks", "host", "clock", "began")},
        coordinates=whole.coordinates[:, kept],
        stages=tuple(
            replace(stage, **{name: getattr(stage, name)[kept] for name in columns})
            for stage in whole.stages
        ),
    )


def without_stage(whole: Telemetry, name: str, ranks: Sequence[int]) -> Telemetry:
    """Return the telemetry as if some ranks had not run a stage."""

    def changed(stage: StageColumns) -> StageColumns:
        if stage.name != name:
            return stage
        start, duration = stage.start.copy(), stage.duration.copy()
        start[list(ranks)], duration[list(ranks)] = NOT_RUN, 0
        return replace(stage, start=start, duration=duration)

    return replace(whole, stages=tuple(map(changed, whole.stages)))


def write_run(root: Path, saves: Sequence[Telemetry], others: Sequence[Telemetry] = ()) -> None:
    """Make a run: a small checkpoint for each save, with its telemetry, and other operations."""
    for each in saves:
        place = root / f"step-{each.step or 0:08d}"
        sw.save(place, {"model": {"w": torch.zeros(8, 4)}}, step=each.step)
        for old in place.glob("telemetry-*"):
            old.unlink()
        write_telemetry(str(place), each)
    for at, each in enumerate(others):
        write_operation(open_store(root), replace(each, id=f"{at:016x}"))


def report_of(folder: Path, save: Telemetry, baseline: Telemetry | None = None) -> sw.Report:
    """Return the report of a save with this telemetry, compared with another save."""
    places = {"save": save} if baseline is None else {"save": save, "baseline": baseline}
    for name, each in places.items():
        sw.save(folder / name, {"w": torch.zeros(2)}, overwrite=True)
        for old in (folder / name).glob("telemetry-*"):
            old.unlink()
        write_telemetry(str(folder / name), each)
    return sw.report(folder / "save", baseline=None if baseline is None else folder / "baseline")


def write_telemetry(place: str, save: Telemetry) -> None:
    """Store the telemetry of a checkpoint at a path or URL."""
    save_id = sw.open(place).layout.save_id
    write_of_save(open_store(place), replace(save, id=save_id, path=place))


def telemetry_of(place: Path) -> Path:
    """Return the telemetry file of a checkpoint."""
    (found,) = place.glob("telemetry-*.json.gz")
    return found
