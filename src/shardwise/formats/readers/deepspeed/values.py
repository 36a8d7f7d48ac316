"""Lays plain values: the scheduler, what the user gave to be saved, DeepSpeed's own."""

from __future__ import annotations

from shardwise.formats.plain import same_plain
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
    own = ranks.optimizers[0, 0].rest if ranks.optimizers else {}
    for key, value in own.items():
        if value is not None:
            laying.value(f"deepspeed.{key}", value)
    of_models = [state.rest for state in ranks.models.values()]
    of_optimizers = [state.rest for state in ranks.optimizers.values()]
    for held, everyone in ((rest, of_models), (own, of_optimizers)):
        for key, value in held.items():
            others = sum(not same_plain(each.get(key), value) for each in everyone)
            if others:
                top = "deepspeed" if key in OF_DEEPSPEED or held is own else "client_state"
                laying.left_out.append(
                    f"{top}.{key}: {others} ranks have others; that of the first is taken"
                )
