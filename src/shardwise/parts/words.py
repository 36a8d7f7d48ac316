"""Format durations, rates, times and ranks as text, for the page of a report and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from shardwise.kernel.events import format_bytes

MOST_RANGES = 4


def format_seconds(seconds: float) -> str:
    """Return a duration: `0 s`, `85 µs`, `12 ms`, `3.12 s`, `31.2 s`, `3 min 12 s`, `2 h 5 min`."""
    if seconds < 0.5e-6:
        return "0 s"
    if seconds < 0.9995e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.0995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 119.5:
        decimals = 2 if seconds < 9.995 else 1 if seconds < 99.95 else 0
        return f"{seconds:.{decimals}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def format_rate(rate: float) -> str:
    """Return bytes per second: `1.20 GiB/s`."""
    return f"{format_bytes(int(rate))}/s"


def format_time(started: str) -> str:
    """Return an ISO 8601 time in UTC, to the second. Return other text unchanged."""
    moment = parse_time(started)
    if moment is None:
        return started
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def parse_time(started: str) -> datetime | None:
    """Return an ISO 8601 time in UTC; None for other text, and if no year fits."""
    try:
        moment = datetime.fromisoformat(started)
        moment = moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ascending ranks: `rank 3`, `ranks 8…15`, `ranks 1, 5, 9, 13 and 12 more`."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], rank)
        else:
            ranges.append((rank, rank))
    shown = [_range(*each) for each in ranges[:MOST_RANGES]]
    more = sum(last - first + 1 for first, last in ranges[MOST_RANGES:])
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(shown)}" + (f" and {more:,} more" if more else "")


def _range(first: int, last: int) -> str:
    between = "" if first == last else f"{', ' if last == first + 1 else '…'}{last}"
    return f"{first}{between}"
