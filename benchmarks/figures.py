"""The figures in the sentences of pages, each computed from results.

A page has `<!-- figure: NAME -->0.07 s<!-- end -->`, and `rewrite_figures` writes what is between
the markers.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.goals import COPY, OURS, RECOVERED, difference, judge
from benchmarks.goals import ratio as ratio_of
from benchmarks.gpu_table import LINK, measured
from benchmarks.summary import Result

FIGURE = re.compile(r"(?<=<!-- figure: )([\w.]+)( -->)(.*?)(?=<!-- end -->)")
UNITS = {"s": 1.0, "ms": 1000.0}


@dataclass(frozen=True)
class Results:
    """All results, by the name of their file without `.json`; those of GPUs apart."""

    named: dict[str, Result]
    of_gpus: dict[str, Result]

    def seconds(self, name: str, row: str) -> float:
        """Return the median of a row."""
        return statistics.median(self.named[name]["seconds"][row])

    def ratio(self, name: str, row: str, base: str) -> float:
        """Return the median of the ratios of two rows."""
        return ratio_of(self.named[name], row, base)

    def difference(self, name: str, row: str, base: str) -> float:
        """Return the median of the differences of two rows."""
        return difference(self.named[name], row, base)

    def goal(self, name: str, text: str) -> float:
        """Return what was measured for a goal."""
        (found,) = (each for each in judge(self.named[name]) if each["goal"] == text)
        return float(found["measured"])

    def cell(self, name: str, table: str, row: str, column: str) -> Any:
        """Return a cell of a table; a row is named by its first cell."""
        (found,) = (
            each
            for each in self.named[name]["tables"][table]
            if str(next(iter(each.values()))) == row
        )
        return found[column]

    def nbytes(self, name: str) -> int:
        """Return the size of the saved state."""
        return self.named[name]["tensors"] * self.named[name]["tensor_bytes"]


Figure = Callable[[Results], str]
RANK_0 = "Rank 0, by the number of ranks"
RAN = "ZeRO-1", "ZeRO-2", "ZeRO-3"
BOTH = "DeepSpeed, both"
BOTH_STARTED = "DeepSpeed, both, but for the start of a process"
OPENED = "DCP", "DeepSpeed ZeRO-3", "torch.save"


def digits(value: float) -> str:
    """Return a number with two significant digits."""
    return f"{float(f'{value:.2g}'):,g}"


def seconds(name: str, row: str, unit: str = "s") -> Figure:
    """Return a figure: the median seconds of a row."""
    return lambda results: f"{digits(results.seconds(name, row) * UNITS[unit])} {unit}"


def times(name: str, row: str, base: str) -> Figure:
    """Return a figure: how many times as long as another row a row took."""
    return lambda results: f"{digits(results.ratio(name, row, base))} times"


def growth(text: str) -> Figure:
    """Return a figure: by how much a cost grows if the number of ranks is multiplied by four."""
    goal = f"{text}: growth for 4 × the ranks, at most"
    return lambda results: f"{results.goal('scale-1-float32', goal):.1f} ×"


def beyond(name: str) -> Figure:
    """Return a figure: by how many milliseconds a restore takes longer than a copy."""
    return lambda results: f"{digits(1000 * results.difference(name, RECOVERED, COPY))} ms"


def size(name: str) -> Figure:
    """Return a figure: the size of the state in a benchmark."""
    return lambda results: f"{digits(results.nbytes(name) / 1e9)} GB"


def of_rank(name: str) -> Figure:
    """Return a figure: the MB of a rank in the benchmark of overhead, from the title of a table."""

    def figure(results: Results) -> str:
        (title,) = results.named[name]["tables"]
        return re.findall(r"[\d,]+ MB", title)[0]

    return figure


def manifest(ranks: str) -> Figure:
    """Return a figure: the size of the manifest of a number of ranks."""
    return lambda results: (
        f"{digits(results.cell('scale-1-float32', RANK_0, ranks, 'manifest, MB'))} MB"
    )


def save_of_all(results: Results) -> str:
    """Return the seconds of rank 0 in a later save of 131,072 ranks."""
    cached, again = (
        results.cell("scale-1-float32", RANK_0, "131072", column)
        for column in ("cached plan, ms", "again, seconds")
    )
    return f"{digits(cached / 1000 + again)} s"


def by_deepspeed(row: str) -> Figure:
    """Return a figure: DeepSpeed's time on four ranks relative to ours, over the three stages."""

    def figure(results: Results) -> str:
        name = "foreign_resume-4-float32"
        found = [results.ratio(name, f"{each}: {row}", f"{each}: sw.load") for each in RAN]
        return f"{digits(min(found))} to {digits(max(found))} times"

    return figure


def opens(results: Results) -> str:
    """Return how long foreign checkpoints take to open."""
    found = [results.seconds("foreign_open-1-float32", each) for each in OPENED]
    return f"{digits(min(found))} to {digits(max(found))} s"


def megabytes(name: str, table: str, row: str, column: str) -> Figure:
    """Return a figure: the megabytes that a cell states in bytes."""
    return lambda results: f"{digits(results.cell(name, table, row, column) / 1e6)} MB"


def milliseconds(name: str, row: str, column: str) -> Figure:
    """Return a figure: a cell with milliseconds of the benchmark of overhead."""

    def figure(results: Results) -> str:
        (title,) = results.named[name]["tables"]
        return f"{digits(results.cell(name, title, row, column))} ms"

    return figure


def pass_of_checksums(results: Results) -> str:
    """Return the seconds of checksums for a GB and core."""
    text = "checksums of a load: seconds a GB and core"
    return f"{digits(results.goal('checksums-2-float32', text))} s"


def on_gpus(value: Callable[[Result], float], text: str) -> Figure:
    """Return a figure: a value of the results of GPUs, from the least to the greatest.

    `text` has `{}` for the value.
    """

    def figure(results: Results) -> str:
        found = sorted({value(each) for each in results.of_gpus.values()})
        ends = dict.fromkeys(digits(each) for each in (found[0], found[-1]))
        return text.format(" to ".join(ends))

    return figure


def waited(result: Result) -> float:
    """Return how long `save` takes on a GPU that waits, in milliseconds."""
    return 1000 * result["seconds_waited"]["waiting"]["median"]


SMALL, LARGE = "snapshots-2-float32", "snapshots_large-2-float32"
LOAD, LOAD_4 = "load-2-float32", "load-4-float32"
CACHED = "sw.load with page_cache=true"
FIGURES: dict[str, Figure] = {
    "pause": seconds(SMALL, OURS),
    "pause.dcp": seconds(SMALL, "dcp.async_save, thread"),
    "pause.state": size(SMALL),
    "restore.beyond_copy": beyond(SMALL),
    "restore.beyond_copy.large": beyond(LARGE),
    "state": size(LOAD),
    "overhead.state": of_rank("overhead-1-float32"),
    "overhead.state.two": of_rank("overhead-2-float32"),
    "overhead.waits": milliseconds("overhead-1-float32", "sw, overlapped", "waits, ms (median)"),
    "overhead.copy": seconds("overhead-1-float32", "one copy of a rank's share", "ms"),
    "load.cold": seconds(LOAD, "cold: sw.load"),
    "load.second": seconds(LOAD, "second: sw.load"),
    "load.cold.cached": seconds(LOAD, f"cold: {CACHED}"),
    "load.second.cached": seconds(LOAD, f"second: {CACHED}"),
    "load.second.times": times(LOAD_4, "second: sw.load", f"second: {CACHED}"),
    "load.save.times": times(LOAD_4, f"save before: {CACHED}", "save before: sw.load"),
    "scale.first_plan": growth("first plan"),
    "scale.first_save": growth("first save"),
    "scale.cached_plan": growth("cached plan"),
    "scale.cached_save": growth("cached save"),
    "scale.save_of_all": save_of_all,
    "scale.plan_of_all": lambda results: (
        f"{digits(results.cell('scale-1-float32', RANK_0, '131072', 'first plan, seconds'))} s"
    ),
    "scale.manifest.64": manifest("64"),
    "scale.manifest.131072": manifest("131072"),
    "checksums.pass": pass_of_checksums,
    "loaders.buffers": megabytes(
        "data_loader-1-float32",
        "Of the loaders' state; 16 streams, 8 workers",
        "loader.buffers",
        "bytes",
    ),
    "foreign.size": megabytes(
        "foreign_resume-1-float32",
        "Bytes read over all ranks, of those of the checkpoint",
        "ZeRO-1",
        "bytes",
    ),
    "foreign.deepspeed": by_deepspeed(BOTH),
    "foreign.deepspeed.started": by_deepspeed(BOTH_STARTED),
    "foreign.opens": opens,
    "gpu.state": on_gpus(lambda r: r["state_bytes"] / 1e9, "{} GB"),
    "gpu.link": on_gpus(lambda r: measured(r, LINK), "{}"),
    "gpu.step": on_gpus(lambda r: r["seconds_of_a_step"]["ahead, without"]["mean"], "{} s"),
    "gpu.steps": on_gpus(lambda r: r["steps_of_each"], "{}"),
    "gpu.save": lambda results: f"{digits(waited(results.of_gpus['h100-1']))} ms",
    "gpu.save.most": lambda results: f"{digits(max(map(waited, results.of_gpus.values())))} ms",
}
"""Each figure by its name."""


def rewrite_figures(text: str, found: Iterable[Result], of_gpus: dict[str, Result]) -> str:
    """Replace the figures between the markers of a page, by all results and those of GPUs.

    Raises:
        ValueError: a marker names no figure, or a result lacks what its figure needs.
    """
    named = {f"{r['question']}-{r['processes']}-{r['dtype']}": r for r in found}
    results = Results(named, of_gpus)

    def write(match: re.Match[str]) -> str:
        name = match[1]
        if name not in FIGURES:
            raise ValueError(
                f"a page has a figure {name!r}, which benchmarks/figures.py does not define"
            )
        try:
            return f"{name}{match[2]}{FIGURES[name](results)}"
        except KeyError as error:
            raise ValueError(
                f"the figure {name!r} needs {error}, which benchmarks/results does not have"
            ) from error

    return FIGURE.sub(write, text)
