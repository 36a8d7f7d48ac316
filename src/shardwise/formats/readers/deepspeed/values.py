"""Lays plain values: the scheduler, what the user gave to be saved, DeepSpeed's own."""

from __future__ import annotations

from shardwise.formats.readers.deepspeed.laying import Laying
from shardwise.formats.readers.deepspeed.ranks import Ranks
from shardwise.formats.readers.deepspeed.states import OF_DEEPSPEED


def lay_values(laying: Laying, ranks: Ranks) -> None:
    """Lay plain values: of the first rank, and say where others have their own."""
    rest = dict(ranks.first.rest)
    scheduler = rest.pop("lr_scheduler", None)
    if scheduler is not None:
        laying.value("scheduler", scheduler)
    for key, value in rest.items():
        if value is not None:
            top = "deepspeed" if key in OF_DEEPSPEED else "client_state"
            laying.value(f"{top}.{key}", value)
    for key, value in (ranks.optimizers[0, 0].rest if ranks.optimizers else {}).items():
        if value is not None:
            laying.value(f"deepspeed.{key}", value)
    for key in rest:
        if key in OF_DEEPSPEED:
            continue
        others = [r for r, s in ranks.models.items() if s.rest.get(key) != rest[key]]
        if others:
            laying.left_out.append(
                f"client_state.{key}: {len(others)} ranks have others; that of the first is taken"
            )
