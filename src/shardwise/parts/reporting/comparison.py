"""Why was this save slow? Compare its telemetry with that of another one.

Two rules find differences in each stage. Both use the ranks' self times, without waiting (see
`stragglers.py`), and ignore differences below 5 % of the other save's duration, or below 50 ms:

- *All ranks*: the median of the ranks changed by 10 % or more.
- *Some ranks*: a rank's time changed by more than that of the median, and by half or more. If both
  saves have the same ranks on as many hosts, each rank is compared with itself, otherwise with the
  median of the other save.

For example, `write` took 12 s on all ranks, and now takes 12.4 s on most and 31 s on those of
`node-17`. The median changed by 3 %, which does not count. The ranks of `node-17` are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.reporting.groups import RankGroup, group_ranks
from shardwise.parts.reporting.stragglers import Seconds, least_excess, lower_median, upper_median
from shardwise.parts.telemetry.records import StageColumns, Telemetry
from shardwise.parts.words import format_rate, format_seconds

LEAST_CHANGE = 0.1
LEAST_CHANGE_OF_RANK = 0.5
MOST_DIFFERENCES = 100
MOST_HOSTS = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """A stage that took another time than in the other save.

    Attributes:
        stage: the name of the stage.
        group: the ranks whose time differs; None if the stage differs on all ranks.
        before, after: the self time in the other save, and in this one: of the slowest of these
            ranks, or the median of all ranks. 0.0 if the stage has not run.
        reason: what changed with it, such as "each rank moved 4.00 GiB instead of 2.00 GiB"; empty
            if nothing is known.
    """

    stage: str
    group: RankGroup | None
    before: float
    after: float
    reason: str = ""

    @property
    def who(self) -> str:
        """The ranks, in words."""
        return "all ranks" if self.group is None else self.group.label

    @property
    def change(self) -> float:
        """By how many seconds this save was slower; negative if it was faster."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How a save differs from another one.

    Attributes:
        path, step, seconds: of this save.
        other_path, other_step, other_seconds: of the save that it is compared with.
        differences: what took longest first; stages that became faster come last.
        notes: what else differs, such as the number of ranks.
    """

    path: str
    step: int | None
    seconds: float
    other_path: str
    other_step: int | None
    other_seconds: float
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """The difference in words: `19.2 s slower than step 100, which took 19.0 s`."""
        change = self.seconds - self.other_seconds
        word = "slower" if change >= 0 else "faster"
        other = self.other_path if self.other_step is None else f"step {self.other_step:,}"
        took = format_seconds(self.other_seconds)
        return f"{format_seconds(abs(change))} {word} than {other}, which took {took}"


def compare_operations(this: Telemetry, other: Telemetry) -> Slowdown:
    """Return the stages, ranks and hosts that differ between two saves."""
    this, other = this.with_arrival(least=0), other.with_arrival(least=0)
    found: list[Difference] = []
    for name in dict.fromkeys(stage.name for each in (this, other) for stage in each.stages):
        found += _compare_stage(this, other, name)
    found.sort(key=lambda each: -each.change)
    return Slowdown(
        path=this.path,
        step=this.step,
        seconds=this.seconds,
        other_path=other.path,
        other_step=other.step,
        other_seconds=other.seconds,
        differences=tuple(found[:MOST_DIFFERENCES]),
        notes=tuple(_notes(this, other)),
    )


def _compare_stage(this: Telemetry, other: Telemetry, name: str) -> Iterator[Difference]:
    stage, before = this.stage(name), other.stage(name)
    least = least_excess(other.seconds)
    own, own_before = _own(stage), _own(before)
    median, median_before = _known(lower_median(own)), _known(lower_median(own_before))
    change = median - median_before
    if abs(change) >= max(least, LEAST_CHANGE * median_before):
        yield Difference(name, None, median_before, median, _reason(stage, before))
    if stage is None or before is None or not len(own_before):
        return
    rows = _rows_in(this, other)
    reference = np.full(len(own), median_before) if rows is None else own_before[rows]
    further = own - reference - max(change, 0.0)
    with np.errstate(invalid="ignore"):
        slow = (further >= least) & (further >= LEAST_CHANGE_OF_RANK * reference)
    for group, at in group_ranks(this, slow, further):
        slowest = int(at[own[at].argmax()])
        reason = _reason(_at(stage, at), before if rows is None else _at(before, rows[at]))
        yield Difference(name, group, float(reference[slowest]), float(own[slowest]), reason)


def _own(stage: StageColumns | None) -> Seconds:
    return np.zeros(0) if stage is None else stage.self_seconds


def _known(seconds: float) -> float:
    return 0.0 if np.isnan(seconds) else seconds


def _rows_in(this: Telemetry, other: Telemetry) -> IntArray | None:
    """Return the row of each rank in the other save; None if the ranks are not the same ones."""
    same = this.world_size == other.world_size and len(this.hosts) == len(other.hosts)
    if not same or not np.isin(this.ranks, other.ranks).all():
        return None
    return np.searchsorted(other.ranks, this.ranks)


@dataclass(frozen=True, slots=True)
class _Moved:
    """What ranks moved in a stage: the median of their bytes and of their bytes per second."""

    bytes: float
    rate: float
    retries: int


def _moved(stage: StageColumns) -> _Moved:
    ran = stage.has_run & (stage.bytes > 0)
    if not ran.any():
        return _Moved(0.0, 0.0, int(stage.retries.sum()))
    moved_bytes = stage.bytes[ran].astype(float)
    rate = moved_bytes / np.maximum(stage.self_seconds[ran], 1e-6)
    return _Moved(lower_median(moved_bytes), upper_median(rate), int(stage.retries.sum()))


def _at(stage: StageColumns, rows: IntArray) -> StageColumns:
    """Return the stage of some rows only."""
    columns = ("start", "duration", "bytes", "retries", "waited", "file")
    return StageColumns(stage.name, *(getattr(stage, column)[rows] for column in columns))


def _reason(stage: StageColumns | None, before: StageColumns | None) -> str:
    if stage is None:
        return "this save did not run the stage"
    if before is None:
        return "only this save ran the stage"
    now, then = _moved(stage), _moved(before)
    who = "host" if stage.by_agents else "rank"
    reasons = []
    if now.retries > then.retries:
        reasons.append(f"{format_count(now.retries, 'retry', 'retries')} instead of {then.retries}")
    if then.bytes and abs(now.bytes - then.bytes) >= LEAST_CHANGE * then.bytes:
        amounts = format_bytes(int(now.bytes)), format_bytes(int(then.bytes))
        reasons.append(f"each {who} moved {amounts[0]} instead of {amounts[1]}")
    elif then.rate and abs(now.rate - then.rate) >= LEAST_CHANGE * then.rate:
        rates = format_rate(now.rate), format_rate(then.rate)
        reasons.append(f"each {who} moved {rates[0]} instead of {rates[1]}")
    return "; ".join(reasons)


def _notes(this: Telemetry, other: Telemetry) -> Iterator[str]:
    """Yield the differences that are not in stages."""
    if this.operation != other.operation:
        yield f"this is a {this.operation}, the other one a {other.operation}"
    if this.world_size != other.world_size:
        yield f"{format_count(this.world_size, 'rank')} instead of {other.world_size:,}"
    if len(this.hosts) != len(other.hosts):
        yield f"{format_count(len(this.hosts), 'host')} instead of {len(other.hosts):,}"
    known = {*other.hosts}
    new = [host for host in this.hosts if host not in known]
    if new and len(new) < len(this.hosts):
        more = f" and {len(new) - MOST_HOSTS:,} more" if len(new) > MOST_HOSTS else ""
        yield f"new hosts: {', '.join(new[:MOST_HOSTS])}{more}"
    for word, each in (("this", this), ("the other", other)):
        missing = each.world_size - len(each.ranks)
        if missing:
            yield f"{format_count(missing, 'rank')} of {word} save sent no telemetry"
    if this.library != other.library:
        yield f"shardwise {this.library} instead of {other.library}"
