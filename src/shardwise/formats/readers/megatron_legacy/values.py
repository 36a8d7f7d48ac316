"""Plain values of a legacy checkpoint of Megatron-LM: under their own names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.formats.build import Builder
from shardwise.formats.containers.pickle_values import Name, Opaque, Record
from shardwise.formats.rankfiles import unlike_values
from shardwise.formats.readers.megatron_legacy.ranks import ARGS, RNG, Rank


def add_values(builder: Builder, ranks: Sequence[Rank], beside: Mapping[str, Any]) -> None:
    """Add what ranks have beside a model and an optimizer.

    All but the states of random generators are those of the first rank.

    Args:
        beside: what the optimizer of the first rank has beside states of parameters.
    """
    first = ranks[0]
    apart = {RNG: None}
    builder.left_out += unlike_values([{**rank.values, **apart} for rank in ranks])
    if first.args:
        builder.add_value(ARGS, _plain_args(builder, first.args))
    for name, value in {**first.values, **beside}.items():
        if name != RNG:
            builder.add_value(name, value)
    for rank in ranks:
        if RNG in rank.values:
            folder = rank.where.rpartition("/")[2]
            builder.add_value(f"{RNG}.{folder}", rank.values[RNG])
    kinds = dict.fromkeys(name.rpartition(".")[2] for rank in ranks for name in rank.unread)
    for kind in kinds:
        names = [n for rank in ranks for n in rank.unread if n.rpartition(".")[2] == kind]
        builder.left_out.append(f"{names[0]} and {len(names) - 1} more: no arrays of the model")


def _plain_args(builder: Builder, args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that have a plain form; of others, such as functions, the name is left."""
    kept = {}
    for name, value in args.items():
        strange = _strange(value)
        if strange is None:
            kept[name] = value
        else:
            builder.left_out.append(f"{ARGS}.{name}: {strange} is not read from pickles")
    return kept


def _strange(value: object) -> str | None:
    if isinstance(value, Opaque):
        return value.name
    parts: list[object] = []
    if isinstance(value, dict):
        parts = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set)):
        parts = list(value)
    elif isinstance(value, Record):
        parts = [*value.args, *value.fields.values()]
    elif isinstance(value, Name):
        return None
    return next((found for part in parts if (found := _strange(part)) is not None), None)
