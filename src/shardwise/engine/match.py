"""Compare names, shapes and dtypes of checkpoint and target before anything is written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from shardwise.engine.exchange import Kept, exchange, exchange_keeping
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.engine.rename_hints import fitting_renames, opening_up
from shardwise.errors import MismatchError
from shardwise.manifest.manifest import Manifest, ObjectEntry, TensorEntry
from shardwise.plan.lookup import SavedState
from shardwise.state.leaves import LocalState, ParameterOrder, TensorLeaf
from shardwise.state.selection import Selection, is_below

log = logging.getLogger("shardwise")
GROUPS, STATE, PARAMS = "param_groups", "state", "params"


@dataclass(frozen=True, slots=True)
class Matched:
    """What a checkpoint fills of this rank's targets, by the target's names, and what does not fit.

    Attributes:
        leaves: the tensors to fill.
        objects, per_rank: the plain values, and the values of each rank, to set.
        missing: names of the target that the checkpoint lacks.
        problems: what does not fit; one line for each name.
        claimed: names of the checkpoint that are used or were not selected.
        unused: patterns of the selection that match no name.
        counts: for each module and optimizer, how many names it has, and how many were found.
    """

    leaves: list[TensorLeaf] = field(default_factory=list)
    objects: list[str] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    claimed: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)


def match(
    held: LocalState,
    saved: SavedState,
    selection: Selection,
    asked: Mapping[str, Collection[str]],
    *,
    cast: bool,
) -> Matched:
    """Find what fills each target, and list everything that does not fit.

    If a target has two names for one memory, it suffices that the checkpoint has one of them.

    Args:
        held: the selected targets.
        asked: the selected names of each module and optimizer. A load must fill one of them.
    """
    found = Matched(problems=list(held.problems))
    absent = []
    for leaf in held.tensors:
        entry = saved.tensor(leaf.name)
        if entry is None:
            absent.append(leaf)
            continue
        found.claimed.add(entry.name)
        leaf = leaf.cut(entry.shape)
        problem = _misfit(leaf, entry, cast=cast)
        if problem is None:
            found.leaves.append(leaf)
        else:
            found.problems.append(problem)
    filled = {leaf.identity for leaf in found.leaves if leaf.identity is not None}
    for leaf in absent:
        if leaf.identity not in filled:
            _miss(found, leaf.name, "a tensor", saved)
    for name in [*held.objects, *held.grouped]:
        if saved.has_object(name):
            found.objects.append(name)
        else:
            _miss(found, name, "a plain value", saved)
    for name in held.per_rank:
        if saved.has_per_rank(name):
            found.per_rank.append(name)
        else:
            _miss(found, name, "a value of each rank", saved)
    others = [*found.objects, *found.per_rank, *held.left]
    found.claimed.update(saved.saved_name(name) for name in others)
    found.unused.extend(selection.unused([*held.names(), *held.left, *saved.all_names()]))
    missing = set(found.missing)
    for owner, names in {**asked, "": [*held.names()]}.items():
        found.counts[owner] = len(names), sum(name not in missing for name in names)
    return found


def _miss(found: Matched, name: str, here: str, saved: SavedState) -> None:
    """Record a target that the checkpoint lacks, or has as a value of another kind."""
    there = saved.kind(name)
    if there is None:
        found.missing.append(name)
        return
    found.claimed.add(saved.saved_name(name))
    found.problems.append(f"{name}: {there} in the checkpoint, {here} in the target")


def _misfit(leaf: TensorLeaf, entry: TensorEntry, *, cast: bool) -> str | None:
    dtype = str(leaf.dtype).removeprefix("torch.")
    if entry.shape != leaf.shape:
        there, here = list(entry.shape), list(leaf.shape)
        padding = " (a specification can cut the padding of a vocabulary)" if leaf.padded else ""
        return f"{leaf.name}: shape {there} in the checkpoint, {here} in the target{padding}"
    if entry.dtype != dtype and not cast:
        return (
            f"{leaf.name}: {entry.dtype} in the checkpoint, {dtype} in the target "
            "(cast=True converts)"
        )
    return None


def agree_on_match(
    look: Callable[[], tuple[Kept, Matched]],
    saved: SavedState,
    selection: Selection,
    targets: Collection[str],
    group: Group,
    *,
    strict: bool,
) -> tuple[Kept, Matched, tuple[str, ...]]:
    """Match names on every rank, and compare the results before any target is written.

    Args:
        look: returns a value to keep, and how this rank's targets match.
        selection: names that it does not select are never unexpected.
        targets: the keys of the state; names below them that no rank claims are unexpected.

    Returns:
        What `look` kept, how this rank's targets match, and the unexpected names.

    Raises:
        MismatchError: on all ranks, if any has a mismatch; if names are missing or unexpected
            and `strict` is set; or if nothing would be filled of a module or an optimizer.
    """
    names = list(saved.all_names())

    def speak() -> tuple[tuple[Kept, Matched], bytes]:
        kept, found = look()
        scope = {saved.saved_name(name) for name in targets}
        claimed = np.array([n in found.claimed or not selection.chooses(n) for n in names], bool)
        inside = np.array([is_below(n, scope) for n in names], bool)
        bits = np.packbits(claimed).tobytes(), np.packbits(inside).tobytes()
        message = (*bits, found.missing, found.problems, found.unused, found.counts)
        return (kept, found), msgspec.msgpack.encode(message)

    def answer(_: object, said: list[bytes]) -> bytes:
        explain = partial(_missing_files, saved)
        return msgspec.msgpack.encode(_unite(names, said, targets, explain, strict=strict))

    (kept, found), reply = exchange_keeping(group, "matching names", speak, answer)
    return kept, found, msgspec.msgpack.decode(reply, type=tuple[str, ...])


def _unite(
    names: list[str],
    said: list[bytes],
    targets: Collection[str],
    missing_files: Callable[[Iterable[str]], str],
    *,
    strict: bool,
) -> list[str]:
    claimed = np.zeros(len(names), bool)
    scope = np.zeros(len(names), bool)
    problems: dict[str, None] = {}
    lost: dict[str, None] = {}
    unused: list[set[str]] = []
    counts: list[Mapping[str, tuple[int, int]]] = []
    for data in said:
        mine, inside, missing, wrong, idle, counted = msgspec.msgpack.decode(
            data,
            type=tuple[bytes, bytes, list[str], list[str], list[str], dict[str, tuple[int, int]]],
        )
        unused.append(set(idle))
        counts.append(counted)
        claimed |= np.unpackbits(np.frombuffer(mine, np.uint8), count=len(names)).astype(bool)
        scope |= np.unpackbits(np.frombuffer(inside, np.uint8), count=len(names)).astype(bool)
        problems |= dict.fromkeys(wrong)
        lost |= dict.fromkeys(missing)
        if strict:
            problems |= dict.fromkeys(f"{name}: not in the checkpoint" for name in missing)
    unexpected = [names[i] for i in np.flatnonzero(scope & ~claimed).tolist()]
    if strict:
        problems |= dict.fromkeys(f"{name}: in the checkpoint only" for name in unexpected)
    else:
        problems |= dict.fromkeys(_unfilled(counts))
    for pattern in sorted(set.intersection(*unused)):
        problems[f"{pattern!r} in only= or skip=: no name matches it"] = None
    if problems:
        unclaimed = [names[i] for i in np.flatnonzero(~claimed).tolist()]
        hint = opening_up(lost, names) or fitting_renames(lost, unexpected, unclaimed, targets)
        accepts = "strict=False accepts missing and unexpected names; " if strict else ""
        raise MismatchError(
            f"checkpoint and target do not fit; nothing was written. {missing_files(lost)}"
            f"{hint}{'; ' if hint else ''}{accepts}rename=, only= and skip= choose and map names:",
            list(problems),
        )
    if lost or unexpected:
        log.warning(
            "load(strict=False): %s; %s",
            _counted(lost, "of the target are not in the checkpoint and stay unchanged"),
            _counted(unexpected, "are only in the checkpoint"),
        )
    return unexpected


def _missing_files(saved: SavedState, lost: Iterable[str]) -> str:
    """Return a sentence that names the missing files which would contain the missing names."""
    absent = saved.absent
    names = [saved.saved_name(name) for name in lost]
    roots = [root for root in absent if any(is_below(name, {root}) for name in names)]
    files = ", ".join(dict.fromkeys(absent[root] for root in roots))
    what = " and ".join(roots)
    return f"{files} is missing, which would contain {what}: copy it too. " if roots else ""


def _unfilled(counts: Iterable[Mapping[str, tuple[int, int]]]) -> list[str]:
    """List the modules and optimizers of which no rank would fill anything, and what to do."""
    asked: set[str] = set()
    found: set[str] = set()
    for counted in counts:
        asked |= {owner for owner, (wanted, _) in counted.items() if wanted}
        found |= {owner for owner, (_, there) in counted.items() if there}
    empty = sorted(asked - found)
    if empty == [""]:
        return ["the checkpoint has none of the target's names"]
    return [
        f"{owner}: the checkpoint has none of its names; skip=[{owner + '.*'!r}] leaves it "
        "unchanged"
        for owner in empty
        if owner
    ]


def _counted(names: Collection[str], what: str) -> str:
    few = ", ".join([*names][:3]) + (", …" if len(names) > 3 else "")
    return f"{len(names)} name(s) {what}" + (f" ({few})" if names else "")


def with_named_parameters(
    opened: Opened, orders: Callable[[], Mapping[str, ParameterOrder]], group: Group
) -> Opened:
    """Give positional parameters of saved optimizers the names that they have in the target.

    As in `Optimizer.load_state_dict`, the first parameter of a group is the first of that group. An
    optimizer whose groups have other sizes, or whose state has other shapes, is left unchanged.

    Args:
        orders: returns the parameter order of the target's optimizers on this rank, by their names
            in the checkpoint.
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
    """Return the positions of the parameters of each group; None if the groups have names."""
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
        renamed = f"{root}.{name}.{key}" if name else entry.name
        tensors.append(msgspec.structs.replace(entry, name=renamed))
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
