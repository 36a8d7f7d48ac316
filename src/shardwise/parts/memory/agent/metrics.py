"""The metrics of a node, in the text format of Prometheus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardwise.parts.memory.agent.status import (
    MirrorStatus,
    RunStatus,
    memory_of,
    read_mirrors,
    read_runs,
)
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.progress import read_progress
from shardwise.parts.memory.records import STAGES

METRICS_PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

_HELP = {
    "agent_memory_bytes": "Private memory of the agent, without snapshots.",
    "free_bytes": "Free bytes of the file system of the snapshots.",
    "run_training": "1 if a trainer of the run is alive on this node.",
    "run_bytes": "Bytes of the run in the memory of this node.",
    "run_slots": "Slots of the run, by state.",
    "stage_step": "Newest step in memory for which the stage has succeeded.",
    "stage_lag_steps": "Steps by which the stage lags behind the newest snapshot.",
    "stage_lag_seconds": "Seconds by which the stage lags behind the newest snapshot.",
    "stage_seconds": "Seconds from staging until the stage ended, for the newest such step.",
    "stage_failures": "Snapshots in memory for which the stage has failed.",
    "ranks": "Ranks of this node, by what they do now.",
    "mirror_waiting_steps": "Steps that wait to be copied to the mirror.",
    "mirror_step": "Newest step that the mirror has.",
    "mirror_failing_seconds": "For how long the mirror has failed; 0 if it does not fail.",
}
"""The metrics, all of them gauges, with their help."""


@dataclass(frozen=True, slots=True)
class _Sample:
    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        labels = ",".join(f'{key}="{value.translate(_ESCAPED)}"' for key, value in self.labels)
        return f"shardwise_{self.name}{f'{{{labels}}}' if labels else ''} {self.value:.10g}"


def read_metrics(home: Home) -> str:
    """Return the metrics of a node."""
    return _format(_samples(home))


def _samples(home: Home) -> Iterator[_Sample]:
    file_system = os.statvfs(home.path)
    yield _Sample("free_bytes", file_system.f_bavail * file_system.f_frsize)
    if (memory := memory_of(os.getpid())) is not None:
        yield _Sample("agent_memory_bytes", memory)
    for status in read_runs(home):
        yield from _samples_of_run(status)
        ranks = read_progress(home.run(status.run))
        counts = Counter((each.operation, each.stage, each.waits) for each in ranks if each.alive)
        for (operation, stage, waits), count in counts.items():
            labels = ("run", status.run), ("operation", operation or "training"), ("stage", stage)
            yield _Sample("ranks", count, (*labels, ("waits", "true" if waits else "false")))
    for mirror in read_mirrors(home):
        yield from _samples_of_mirror(mirror)


def _samples_of_run(run: RunStatus) -> Iterator[_Sample]:
    label = ("run", run.run)
    yield _Sample("run_training", float(run.training), (label,))
    yield _Sample("run_bytes", run.bytes, (label,))
    yield _Sample("run_slots", run.slots_used, (label, ("state", "used")))
    yield _Sample("run_slots", run.slots_free, (label, ("state", "free")))
    for stage in STAGES:
        labels = label, ("stage", stage)
        lag = run.lag[stage]
        statuses = [getattr(each, stage) for each in run.snapshots]
        seconds = [each.seconds for each in statuses if each.state == "done"]
        values = {
            "stage_step": lag.step,
            "stage_lag_steps": lag.steps,
            "stage_lag_seconds": lag.seconds,
            "stage_seconds": seconds[-1] if seconds else None,
            "stage_failures": sum(each.state == "failed" for each in statuses),
        }
        for name, value in values.items():
            if value is not None:
                yield _Sample(name, value, labels)


def _samples_of_mirror(mirror: MirrorStatus) -> Iterator[_Sample]:
    labels = ("run", mirror.run), ("mirror", mirror.mirror)
    yield _Sample("mirror_waiting_steps", len(mirror.waiting), labels)
    yield _Sample("mirror_failing_seconds", mirror.failing or 0.0, labels)
    if mirror.newest is not None:
        yield _Sample("mirror_step", mirror.newest, labels)


def _format(samples: Iterable[_Sample]) -> str:
    by_name: dict[str, list[_Sample]] = {name: [] for name in _HELP}
    for sample in samples:
        by_name[sample.name].append(sample)
    lines = []
    for name, found in by_name.items():
        if found:
            lines.append(f"# HELP shardwise_{name} {_HELP[name]}")
            lines.append(f"# TYPE shardwise_{name} gauge")
            lines += map(str, found)
    return "\n".join([*lines, ""])
