"""The main results: one line and one bar each, computed from the results of the benchmarks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Result = dict[str, Any]


@dataclass(frozen=True)
class Headline:
    """A comparison to show first.

    Attributes:
        text: what was measured.
        result: the name of the file with the result, without `.json`.
        ours: the name of our row in the result.
        peer: the name of the row to compare with.
        base: a row whose seconds are subtracted from both, such as training without snapshots.
        label: how to call the peer, if the name of its row does not say it.
    """

    text: str
    result: str
    ours: str
    peer: str
    base: str | None = None
    label: str | None = None


HEADLINES = (
    Headline(
        "pause of the training by a save",
        "snapshots-2-float32",
        "sw: save",
        "dcp.async_save, thread",
        label="dcp.async_save",
    ),
    Headline(
        "slow-down by a snapshot at every step",
        "overhead-2-float32",
        "sw, overlapped",
        "dcp.async_save, thread, reused buffers",
        "no snapshots",
        "dcp.async_save",
    ),
    Headline("save until it is durable", "durable_save-4-float32", "sw.save", "dcp.save"),
    Headline("save of many small tensors", "many_tensors-2-float32", "sw.save", "dcp.save"),
    Headline("cold load", "load-4-float32", "cold: sw.load", "cold: dcp.load", label="dcp.load"),
    Headline(
        "second load on the same node",
        "load-4-float32",
        "second: sw.load",
        "second: dcp.load",
        label="dcp.load",
    ),
    Headline(
        "warm load, rows to columns",
        "reshard-4-float32",
        "warm: sw.load, rows to columns",
        "warm: dcp.load, rows to columns",
        label="dcp.load",
    ),
    Headline(
        "download from an object store",
        "object_store-2-float32",
        "download: sw",
        "download: DCP through s3fs",
        label="DCP with s3fs",
    ),
    Headline(
        "upload to an object store",
        "object_store-2-float32",
        "upload: sw",
        "upload: DCP through s3fs",
        label="DCP with s3fs",
    ),
    Headline(
        "resume from DeepSpeed ZeRO-3 on four ranks",
        "foreign_resume-4-float32",
        "ZeRO-3: sw.load",
        "ZeRO-3: DeepSpeed, both",
        label="ds_to_universal",
    ),
)


@dataclass(frozen=True)
class Comparison:
    """Medians over the rounds: seconds, and how many times as long the peer takes."""

    text: str
    peer: str
    our_seconds: float
    peer_seconds: float
    ratio: float


def compare(results: Iterable[Result]) -> Iterator[Comparison]:
    """Yield the comparisons whose results exist, in the order of `HEADLINES`."""
    found = {f"{r['question']}-{r['processes']}-{r['dtype']}": r["seconds"] for r in results}
    for headline in HEADLINES:
        if headline.result not in found:
            continue
        seconds = found[headline.result]
        ours, peer = seconds[headline.ours], seconds[headline.peer]
        if headline.base is not None:
            base = seconds[headline.base]
            ours = [each - less for each, less in zip(ours, base, strict=True)]
            peer = [each - less for each, less in zip(peer, base, strict=True)]
        yield Comparison(
            headline.text,
            headline.label or headline.peer,
            statistics.median(ours),
            statistics.median(peer),
            statistics.median(p / o for p, o in zip(peer, ours, strict=True)),
        )
