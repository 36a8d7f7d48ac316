"""The sections of the page that need no script: sentences, tables and bars, as HTML.

Every text from telemetry, a path or a manifest is escaped by `escape`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

import numpy as np

from shardwise.kernel.events import format_bytes, format_count
from shardwise.parts.listing import ListedCheckpoint
from shardwise.parts.reporting.collect import Operation
from shardwise.parts.reporting.comparison import Difference, Slowdown
from shardwise.parts.reporting.stragglers import Straggler, lower_median, upper_median
from shardwise.parts.telemetry.records import StageColumns, Telemetry
from shardwise.parts.words import (
    format_ranks,
    format_rate,
    format_seconds,
    format_time,
)

MOST_BARS = 120
MOST_RECOVERIES = 20
MOST_ROWS = 20
PHASE_COLOURS = 10


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Return a table of texts. Columns whose header starts with `#` have numbers."""
    kinds = ["num" if name.startswith("#") else "" for name in header]
    names = [name.lstrip("#") for name in header]
    head = "".join(
        f'<th scope="col" class="{kind}">{escape(name)}</th>'
        for kind, name in zip(kinds, names, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{kind}" data-label="{escape(name)}">{escape(cell)}</td>'
            for kind, name, cell in zip(kinds, names, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    hidden = f'<caption class="hidden">{escape(caption)}</caption>'
    return (
        f'<div class="scroll"><table class="findings">{hidden}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def problems(texts: Sequence[str]) -> str:
    """Return the list of what is damaged or missing; nothing if all is intact."""
    if not texts:
        return ""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<section class="notice" aria-label="Problems"><ul>{lines}</ul></section>'


def summary(
    operation: Operation,
    telemetry: Telemetry,
    found: Sequence[Straggler],
    slowdown: Slowdown | None,
) -> str:
    """Return the heading of an operation: what it was, what made it slow, and its figures."""
    tiles = {"seconds": ("duration", format_seconds(operation.seconds))}
    if operation.bytes:
        tiles["bytes"] = ("data", format_bytes(operation.bytes))
        rate = operation.bytes / operation.seconds if operation.seconds else 0.0
        tiles["rate"] = ("overall rate", format_rate(rate))
    tiles["ranks"] = ("rank" if operation.ranks == 1 else "ranks", f"{operation.ranks:,}")
    tiles["hosts"] = ("host" if operation.hosts == 1 else "hosts", f"{operation.hosts:,}")
    tiles["retries"] = ("retries", f"{telemetry.retries:,}")
    shown = "".join(
        f"<div><dd>{escape(value)}</dd><dt>{escape(label)}</dt></div>"
        for label, value in tiles.values()
    )
    versus = "" if slowdown is None else f"<p>It was {escape(slowdown.sentence)}.</p>"
    return (
        f"<h1>{escape(operation.headline)}</h1>"
        f'<p class="verdict">{_verdict(found)}</p>{versus}{_missing(operation, telemetry)}'
        f'<p class="quiet">{escape(format_time(operation.started))} · '
        f"shardwise {escape(telemetry.library)} · <code>{escape(operation.path)}</code></p>"
        f'<dl class="tiles">{shown}</dl>'
    )


def _verdict(found: Sequence[Straggler]) -> str:
    if not found:
        return "No rank was much slower than the others."
    first = found[0]
    seconds, median = (
        f'<span class="whole">{format_seconds(each)}</span>'
        for each in (first.seconds, first.median)
    )
    text = (
        f"<b>{escape(first.who)}</b> was slow in <b>{escape(first.stage)}</b>: {seconds}, "
        f"where the median of all ranks is {median}."
    )
    more = len(found) - 1
    return text + (f" {format_count(more, 'more straggler')} below." if more else "")


def _missing(operation: Operation, telemetry: Telemetry) -> str:
    if not operation.missing:
        return ""
    has = np.isin(np.arange(min(operation.ranks, 2**20)), telemetry.ranks)
    ranks = format_ranks(np.flatnonzero(~has).tolist())
    text = f"{format_count(operation.missing, 'rank')} sent no telemetry: {ranks}"
    return f'<p class="warning">{escape(text)}</p>'


def stragglers(found: Sequence[Straggler]) -> str:
    """Return the table of stragglers."""
    if not found:
        return "<p>No rank was much slower than the others in any stage.</p>"
    rows = [
        (
            each.stage,
            each.who,
            format_seconds(each.seconds),
            format_seconds(each.median),
            f"+{format_seconds(each.excess)}",
        )
        for each in found[:MOST_ROWS]
    ]
    header = ("stage", "who", "#slowest of them", "#median of all", "#above median")
    more = len(found) - len(rows)
    rest = f'<p class="quiet">… and {more:,} more</p>' if more else ""
    return table(header, rows, "Stragglers") + rest


def stages(telemetry: Telemetry) -> str:
    """Return a row for each stage: when it ran, and how long."""
    total = max(telemetry.seconds, 1e-6) * 1e6
    rows = []
    for at, stage in enumerate(telemetry.stages):
        ran = stage.has_run
        if not ran.any():
            continue
        start, end = stage.start[ran], (stage.start + stage.duration)[ran]
        own, began = stage.self_seconds, float(np.median(start))
        slowest = int(np.nanargmax(own))
        wide = _bar(start.min() / total, end.max() / total, "range")
        ended = began + lower_median(own) * 1e6
        usual = _bar(began / total, ended / total, f"usual c{at % 10}")
        rows.append(
            f'<tr><th scope="row">{escape(stage.name)}</th><td class="track" aria-hidden="true">'
            f"<div>{wide}{usual}</div></td>"
            f'<td class="num" data-label="median">{format_seconds(lower_median(own))}</td>'
            f'<td class="num" data-label="slowest">{format_seconds(own[slowest])}</td>'
            f'<td data-label="slowest rank">rank {telemetry.ranks[slowest]}</td></tr>'
        )
    names = {"stage": "", "when": "", "median": "num", "slowest": "num", "slowest rank": ""}
    head = "".join(f'<th scope="col" class="{kind}">{name}</th>' for name, kind in names.items())
    return (
        '<div class="scroll"><table class="stages"><caption class="hidden">Stages</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="scale quiet" aria-hidden="true"><span>0 s</span>'
        f"<span>{format_seconds(telemetry.seconds)}</span></p>"
    )


def bandwidth(telemetry: Telemetry, best: Mapping[str, float]) -> str:
    """Return a row for each stage that moves bytes: the rates of its ranks, and the run's best."""
    rows = [row for stage in telemetry.stages if (row := _rates(stage, best.get(stage.name, 0.0)))]
    if not rows:
        return "<p>No stage of this operation counts bytes.</p>"
    return f'<div class="rates">{"".join(rows)}</div>'


def _rates(stage: StageColumns, best: float) -> str:
    own = stage.self_seconds
    ran = stage.has_run & (stage.bytes > 0) & (own > 0)
    if not ran.any():
        return ""
    rates = stage.bytes[ran] / own[ran]
    low, middle, high = float(rates.min()), upper_median(rates), float(rates.max())
    best = max(best, high)
    texts = {
        "slowest": low,
        "median": middle,
        "fastest": high,
        "best of the run": best,
    }
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{format_rate(rate)}</dd></div>" for name, rate in texts.items()
    )
    who = "each host" if stage.by_agents else "each rank"
    share = f"{who}, {middle / best:.0%} of the best"
    return (
        f'<div class="rate"><h3>{escape(stage.name)} <small>{share}</small></h3>'
        f'<div class="gauge" aria-hidden="true">{_bar(low / best, high / best, "range")}'
        f'<i class="median" style="left:{middle / best:.2%}"></i><i class="best"></i></div>'
        f"<dl>{shown}</dl></div>"
    )


def _bar(start: float, end: float, style: str) -> str:
    start, end = max(0.0, min(start, 1.0)), max(0.0, min(end, 1.0))
    return f'<i class="{style}" style="left:{start:.2%};width:{max(end - start, 0.0):.2%}"></i>'


def comparison(slowdown: Slowdown) -> str:
    """Return why a save was slower than another one."""
    rows = [
        (
            each.stage,
            each.who,
            format_seconds(each.before),
            format_seconds(each.after),
            signed(each),
            each.reason,
        )
        for each in slowdown.differences[:MOST_ROWS]
    ]
    header = ("stage", "who", "#then", "#now", "#change", "also changed")
    shown = table(header, rows, "Differences") if rows else "<p>No stage differs much.</p>"
    notes = "".join(f"<li>{escape(note)}</li>" for note in slowdown.notes)
    listed = f'<ul class="notes">{notes}</ul>' if notes else ""
    is_slow = slowdown.differences and slowdown.seconds > slowdown.other_seconds
    title = "Why was it slow?" if is_slow else "Comparison with another save"
    return (
        f"<h2>{title}</h2><p>This save was {escape(slowdown.sentence)} "
        f"(<code>{escape(slowdown.other_path)}</code>).</p>{listed}{shown}"
    )


def signed(difference: Difference) -> str:
    """Return the change of a stage with its sign: `+12.3 s`, `−0.50 s`."""
    sign = "+" if difference.change >= 0 else "−"
    return sign + format_seconds(abs(difference.change))


def growth(operations: Sequence[Operation], checkpoints: Sequence[ListedCheckpoint]) -> str:
    """Return the sizes of the run's checkpoints and the durations of its saves, by step."""
    saves = [each for each in operations if each.is_save and each.step is not None]
    kinds = dict.fromkeys(each.operation for each in saves)
    charts = []
    for kind in kinds:
        points = [
            (each.step or 0, each.seconds, format_seconds(each.seconds))
            for each in saves
            if each.operation == kind
        ]
        charts.append(_bars(f"seconds of each {kind}", points))
    sizes = [
        (each.step or 0, float(each.bytes), format_bytes(each.bytes))
        for each in checkpoints
        if each.bytes is not None
    ]
    charts.append(_bars("size of each checkpoint", sizes))
    return f'<div class="charts">{"".join(charts)}</div>' if any(charts) else ""


def _bars(title: str, points: Sequence[tuple[int, float, str]]) -> str:
    """Return a chart with a bar for each step; the last 120."""
    points = sorted(points)[-MOST_BARS:]
    if not points:
        return ""
    largest = max(points, key=lambda each: each[1])
    top = largest[1] or 1.0
    bars = "".join(
        f'<i style="height:{value / top:.1%}" title="step {step:,}: {escape(text)}"></i>'
        for step, value, text in points
    )
    first, last = points[0], points[-1]
    label = f"{title}: {first[2]} at step {first[0]:,}, {last[2]} at step {last[0]:,}"
    most = f"largest {largest[2]} at step {largest[0]:,}"
    return (
        f'<figure style="--bars:{len(points)}"><figcaption><b>{escape(title)}</b> '
        f'<span>{escape(most)}</span></figcaption><div class="bars" role="img" '
        f'aria-label="{escape(label)}">{bars}</div><div class="scale quiet"><span>step '
        f"{first[0]:,}</span><span>{last[0]:,}</span></div></figure>"
    )


def recoveries(operations: Sequence[Operation]) -> str:
    """Return the restores of the run, each with the duration of its phases, the newest first."""
    found = [each for each in operations if each.operation == "restore"][-MOST_RECOVERIES:]
    phases = [_phases(each) for each in found]
    longest = max((sum(shares.values()) for shares in phases), default=0.0) or 1.0
    rows = []
    for each, shares in reversed([*zip(found, phases, strict=True)]):
        parts = "".join(
            f'<i class="c{at % PHASE_COLOURS}" style="width:{seconds / longest:.2%}" '
            f'title="{escape(name)}: {format_seconds(seconds)}"></i>'
            for at, (name, seconds) in enumerate(shares.items())
        )
        texts = "".join(
            f'<li><i class="c{at % PHASE_COLOURS}"></i>{escape(name)} '
            f"{format_seconds(seconds)}</li>"
            for at, (name, seconds) in enumerate(shares.items())
        )
        rows.append(
            f'<div class="recovery"><h3>{escape(each.name)} '
            f"<small>{format_seconds(each.seconds)} · "
            f"{escape(format_time(each.started))} · {each.amounts}</small></h3>"
            f'<div class="parts" aria-hidden="true">{parts}</div>'
            f'<ul class="legend">{texts}</ul></div>'
        )
    return "".join(rows)


def _phases(operation: Operation) -> dict[str, float]:
    """Return the seconds of each phase; what no phase covers is `other`."""
    phases = operation.phases or operation.medians
    shares = {name: seconds for name, seconds in phases.items() if seconds > 0}
    rest = operation.seconds - sum(shares.values())
    return {**shares, "other": rest} if rest > 0.01 * operation.seconds else shares
