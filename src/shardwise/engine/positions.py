"""Saved optimizers that number their parameters, given the names that these have in the target.

As `Optimizer.load_state_dict` has it: the first of a group is the first of that group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.manifest.manifest import Manifest, ObjectEntry, TensorEntry
from shardwise.state.leaves import ParameterOrder

GROUPS, STATE, PARAMS = "param_groups", "state", "params"


def with_names_by_position(
    opened: Opened, orders: Callable[[], Mapping[str, ParameterOrder]], group: Group
) -> Opened:
    """The same checkpoint, with names in optimizers that number what the target's groups have.

    One whose groups, or shapes of what its state has of parameters, are others, stays as it is.

    Args:
        orders: of the target's optimizers, by their names in the checkpoint, on this rank.
    """
    numbered = {
        entry.name.removesuffix(f".{GROUPS}"): entry.value
        for entry in opened.manifest.objects
        if entry.name.endswith(f".{GROUPS}") and _numbers(entry.value) is not None
    }
    if not numbered:
        return opened

    def answer(said: list[bytes]) -> bytes:
        return said[0] if len(set(said)) == 1 else msgspec.msgpack.encode({})

    reply = exchange(
        group, "naming parameters", lambda: msgspec.msgpack.encode(dict(orders())), answer
    )
    known = msgspec.msgpack.decode(reply, type=dict[str, list[list[tuple[str, tuple[int, ...]]]]])
    manifest = opened.manifest
    for root in numbered.keys() & known.keys():
        manifest = _named(manifest, root, known[root])
    return replace(opened, manifest=manifest)


def _numbers(groups: Any) -> list[list[int]] | None:
    """The numbers of the parameters of each group, if these are all that there is of them."""
    try:
        found = msgspec.convert(groups, list[dict[str, Any]])
        return msgspec.convert([group.get(PARAMS) for group in found], list[list[int]])
    except msgspec.ValidationError:
        return None


def _named(manifest: Manifest, root: str, order: ParameterOrder) -> Manifest:
    groups = next(each.value for each in manifest.objects if each.name == f"{root}.{GROUPS}")
    numbers = _numbers(groups) or []
    if [len(each) for each in numbers] != [len(each) for each in order]:
        return manifest
    pairs = zip(
        (number for each in numbers for number in each),
        (parameter for each in order for parameter in each),
        strict=True,
    )
    parameters = {f"{root}.{STATE}.{number}": parameter for number, parameter in pairs}
    tensors = []
    for entry in manifest.tensors:
        owner, _, key = entry.name.rpartition(".")
        name, shape = parameters.get(owner, ("", ()))
        if name and entry.shape not in ((), shape):
            return manifest
        tensors.append(_moved(entry, f"{root}.{name}.{key}") if name else entry)
    named = [
        {
            "members": [name for name, _ in members],
            "value": {key: value for key, value in settings.items() if key != PARAMS},
        }
        for members, settings in zip(order, groups, strict=True)
    ]
    objects = tuple(
        ObjectEntry(each.name, named) if each.name == f"{root}.{GROUPS}" else each
        for each in manifest.objects
    )
    return msgspec.structs.replace(manifest, tensors=tuple(tensors), objects=objects)


def _moved(entry: TensorEntry, name: str) -> TensorEntry:
    return msgspec.structs.replace(entry, name=name)
