"""Assemble the page: one HTML file, which needs no network.

`page/` has its parts: a template, a style and scripts. The scripts draw what depends on ranks.
Everything else is HTML that `sections.py` makes. The page allows no other script: its header has
the checksum of ours.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from shardwise.parts.reporting import sections
from shardwise.parts.reporting.collect import Collected, Operation
from shardwise.parts.reporting.comparison import Slowdown
from shardwise.parts.reporting.rank_data import rank_data
from shardwise.parts.reporting.stragglers import find_stragglers
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.words import format_seconds

FILES = Path(__file__).parent / "page"
SCRIPTS = ("data", "arrange", "hints", "heat", "timeline", "ranks", "tensors", "page")


@dataclass(frozen=True, slots=True)
class Shown:
    """An operation that the page shows in detail.

    Attributes:
        slowdown: how it differs from another save; None if there is nothing to compare with.
    """

    operation: Operation
    telemetry: Telemetry
    slowdown: Slowdown | None


def make_page(
    title: str,
    collected: Collected,
    shown: Sequence[Shown],
    tensors: Sequence[dict[str, Any]],
    problems: Sequence[str],
) -> str:
    """Return the page.

    Args:
        title: the path of the checkpoint or of the run.
        shown: the operations with all their ranks; the first one is shown at the start.
        tensors: the maps of tensors; see `tensor_map.py`.
        problems: what is damaged or missing.
    """
    parts: dict[str, str] = dict.fromkeys(_PARTS_OF_OPERATION, "")
    data = []
    for at, each in enumerate(shown):
        found = find_stragglers(each.telemetry)
        data.append(rank_data(each.telemetry, found))
        best = _best_rates(collected.operations, each.operation)
        made = (
            sections.summary(each.operation, each.telemetry, found, each.slowdown),
            sections.stages(each.telemetry),
            sections.stragglers(found),
            sections.bandwidth(each.telemetry, best),
            "" if each.slowdown is None else sections.comparison(each.slowdown),
        )
        for name, html in zip(_PARTS_OF_OPERATION, made, strict=True):
            hidden = " hidden" if at else ""
            parts[name] += f'<div data-operation="{at}"{hidden}>{html}</div>' if html else ""
    script = "\n".join(_text(f"{name}.js") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _fill(
        _text("page.html"),
        {
            **parts,
            "title": escape(title),
            "digest": digest,
            "style": _text("page.css"),
            "choices": _choices(shown),
            "problems": sections.problems(problems),
            "growth": sections.growth(collected.operations, collected.checkpoints),
            "recoveries": sections.recoveries(collected.operations),
            "data": _json({"operations": data, "tensors": list(tensors)}),
            "script": script,
        },
    )


_PARTS_OF_OPERATION = ("summary", "stages", "stragglers", "bandwidth", "comparison")


def _best_rates(operations: Sequence[Operation], until: Operation) -> dict[str, float]:
    """Return, by stage, the rate of the fastest rank of this and earlier operations of the kind."""
    best: dict[str, float] = {}
    for each in operations:
        if each.operation == until.operation and each.started <= until.started:
            for stage, rate in each.rates.items():
                best[stage] = max(rate, best.get(stage, 0.0))
    return best


def _choices(shown: Sequence[Shown]) -> str:
    """Return the options of the list of operations."""
    options = []
    for at, each in enumerate(shown):
        seconds = format_seconds(each.operation.seconds)
        text = f"{each.operation.name} · {seconds}"
        options.append(f'<option value="{at}">{escape(text)}</option>')
    return "".join(options)


def _text(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _fill(template: str, parts: dict[str, str]) -> str:
    """Replace each `{{name}}` of the template, but none in what is inserted."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found.group(1)], template)


def _json(document: object) -> str:
    """Return JSON that cannot end the element it is in, nor begin a comment."""
    return msgspec.json.encode(document).decode().replace("<", "\\u003c")
