"""Adds the state of optimizers that ZeRO does not divide, and assigns it to parameters.

The files do not name the optimizer's parameters. Their shapes tell them, and if there are master
weights, their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import eq
from typing import Any, TypeAlias

import torch

from shardwise.parts.formats.masters import (
    Run,
    describe_wrong_masters,
    find_common_run,
    find_flat_run,
    find_wrong_masters,
    part_of_run,
    read_runs,
)
from shardwise.parts.formats.reader import Builder, FileTree, FormatError, ParamGroup, StoredArray
from shardwise.parts.formats.readers.deepspeed.manifest import (
    add_flat_group,
    add_param_groups,
    add_state,
    tensor_name,
)
from shardwise.parts.formats.readers.deepspeed.states import (
    ModelState,
    OptimizerState,
    Shape,
    parse_undivided_optimizer,
)
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import PlacementRule
from shardwise.parts.formats.readers.deepspeed.zero import (
    MASTER,
    FlatGroup,
    find_flat_groups,
    runs_of_masters,
)

MOST_PREFIXES, MOST_SLOTS = 200_000, 10_000
"""The most prefixes that `assign_members` follows, and slots that it compares with a parameter."""
_WINDOWS, _WINDOW, _BEGINNING = 8, 512, 16
"""How many elements of a large parameter are compared to find its master weight."""

Arrays: TypeAlias = Mapping[str, StoredArray]
Group: TypeAlias = "Sequence[Shape | None] | int"
"""The shapes of a group's members, None for one without state; or the number of elements of all
members, if they are flattened."""
Slot: TypeAlias = tuple[int, int]
"""A group, and the index of a member in it; or, in a flattened group, the first element."""
Agreement: TypeAlias = Callable[[str, Iterable[Slot]], set[Slot]]
"""Returns in which of some slots the values of a parameter are."""
Prefix: TypeAlias = tuple[int, ...]
"""For each group, how many members or elements the parameters so far have taken."""


def add_undivided_optimizer(
    builder: Builder,
    states: Sequence[ModelState],
    modules: Sequence[Arrays],
    parameters: Mapping[str, Shape],
    placement_rule: PlacementRule,
) -> None:
    """Add the state of an optimizer without ZeRO, and its master weights if there are any.

    The checkpoint does not store the names in each param group. They are inferred, if only one
    assignment is possible. Otherwise the state is left out; also if the master weights contradict
    the module.

    Args:
        states: the model states of all tensor-parallel ranks, with optimizers.
        modules: the module of each of them.
        parameters: names and shapes of all parameters that may be trained, on the first rank, in
            the module's order.

    Raises:
        FormatError: the state is malformed, or does not fit these parameters.
    """
    ranks = [parse_undivided_optimizer(each.optimizer or {}, each.path) for each in states]
    first = ranks[0]
    members = _infer_members(builder.tree, first, parameters, modules[0])
    if members is None:
        by = "shapes and master weights" if first.masters else "shapes"
        builder.left_out.append(
            f"optimizer.*: the checkpoint does not name the optimizer's parameters, and their {by} "
            "are ambiguous: load it with DeepSpeed, and save it with sw.save"
        )
        return
    names = [name for group in members for name in group]
    if first.partition_counts:  # flat, as under ZeRO 1 with a single data-parallel rank
        shards = _find_flat_shards(ranks, members, modules)
        runs = [
            run
            for groups, own in zip(shards, modules, strict=True)
            for group in groups
            for run in runs_of_masters(group, own)
        ]
    else:
        _require_same_counts(ranks, names)
        runs = [*_runs_of_members(ranks, names, modules)]
    if wrong := find_wrong_masters(builder.tree, runs):
        builder.left_out.append(describe_wrong_masters(wrong))
        return
    if first.partition_counts:
        for same_groups in zip(*shards, strict=True):
            add_flat_group(builder, same_groups, placement_rule)
    else:
        _add_parameters(builder, ranks, names, placement_rule)
    add_param_groups(
        builder,
        [
            ParamGroup(tuple(filter(None, group)), hyperparameters)
            for group, hyperparameters in zip(members, first.hyperparameters or (), strict=True)
        ],
    )


def _find_flat_shards(
    ranks: Sequence[OptimizerState],
    members: Sequence[Sequence[str | None]],
    modules: Sequence[Arrays],
) -> list[list[FlatGroup]]:
    shards = []
    for rank, own in zip(ranks, modules, strict=True):
        shapes = [{n: own[n].shape for n in filter(None, group)} for group in members]
        shards.append([*find_flat_groups(shapes, [rank], data_before_experts=False)])
    return shards


def _runs_of_members(
    ranks: Sequence[OptimizerState], names: Sequence[str | None], modules: Sequence[Arrays]
) -> Iterator[tuple[str, Run]]:
    for rank, own in zip(ranks, modules, strict=True):
        for name, master in zip(names, rank.masters, strict=False):
            weights = own.get(name or "")
            if name is not None and weights is not None and weights.shape == master.shape:
                origin = (0,) * len(master.shape)
                if run := find_common_run(origin, master, origin, weights):
                    yield name, run


def _infer_members(
    tree: FileTree, optimizer: OptimizerState, parameters: Mapping[str, Shape], weights: Arrays
) -> list[list[str | None]] | None:
    """Return the names of the members of each param group, if shapes or values determine them."""
    groups: list[Group]
    if optimizer.partition_counts:
        groups = [math.prod(master.shape) for master in optimizer.masters]
    else:
        shapes: list[list[Shape | None]] = [[] for _ in optimizer.hyperparameters or ()]
        for index, group in enumerate(optimizer.param_group_of):
            shapes[group].append(_shape_of_member(optimizer, index))
        groups = [*shapes]
    ordered = list(parameters.items())
    if not optimizer.masters:
        return assign_members(ordered, groups)
    found = assign_members(ordered, groups, most_prefixes=MOST_PREFIXES // 10)
    if found is None:
        own = {name: weights[name] for name in parameters}
        agreeing = _comparison(tree, optimizer, groups, own)
        found = assign_members(
            ordered, groups, agreeing, _find_unlike_later(tree, own, optimizer.masters)
        )
    return found


def _shape_of_member(optimizer: OptimizerState, index: int) -> Shape | None:
    """Return the shape of a member; None if it has no state: for example, if it is frozen."""
    if optimizer.masters:
        return optimizer.masters[index].shape
    values = optimizer.states[index].values()
    return max((v.shape for v in values if isinstance(v, StoredArray)), key=len, default=None)


def _comparison(
    tree: FileTree, optimizer: OptimizerState, groups: Sequence[Group], weights: Arrays
) -> Agreement:
    """Return a function that reads in which slots the weights of a parameter are.

    Master weights, rounded to the dtype of the weights, are equal to them. Of large parameters, a
    sample is read.
    """
    first_member = {group: i for i, group in reversed([*enumerate(optimizer.param_group_of)])}
    beginnings: dict[tuple[Slot, str], list[float]] = {}

    def run_of(name: str, slot: Slot) -> Run | None:
        (group, position), own = slot, weights[name]
        master = optimizer.masters[first_member[group]]
        if isinstance(groups[group], int):
            return find_flat_run(master, position, own, 0, math.prod(own.shape))
        origin, master = (0,) * len(own.shape), optimizer.masters[first_member[group] + position]
        return find_common_run(origin, master, origin, own)

    def begin_alike(runs: Mapping[Slot, Run]) -> dict[Slot, Run]:
        """Keep the runs that begin alike. Most do not, and nothing is read twice to find out."""
        begins = {slot: _cut(run, 0, _BEGINNING) for slot, run in runs.items()}
        new = {slot: run for slot, run in begins.items() if (slot, run[1].dtype) not in beginnings}
        values = read_runs(tree, {run[0] for run in new.values()} | {r[1] for r in begins.values()})
        for slot, (master, own) in new.items():
            rounded = values[master].to(values[own].dtype)
            beginnings[slot, own.dtype] = rounded.tolist()
        kept = {}
        for slot, (_, own) in begins.items():
            known, wanted = beginnings[slot, own.dtype], values[own].tolist()
            if all(map(eq, known, wanted)):
                kept[slot] = runs[slot]
        return kept

    def agreeing(name: str, slots: Iterable[Slot]) -> set[Slot]:
        found = {slot: run_of(name, slot) for slot in slots}
        unknown = {slot for slot, run in found.items() if run is None}
        alike = begin_alike({slot: run for slot, run in found.items() if run is not None})
        cuts = {slot: [_cut(run, *each) for each in _windows(run)] for slot, run in alike.items()}
        values = read_runs(tree, {array for each in cuts.values() for run in each for array in run})
        return unknown | {
            slot
            for slot, each in cuts.items()
            if all(torch.equal(values[m].to(values[w].dtype), values[w]) for m, w in each)
        }

    return agreeing


def _find_unlike_later(tree: FileTree, weights: Arrays, masters: Sequence[StoredArray]) -> set[str]:
    """Return the parameters that begin otherwise than all later ones.

    If some arrays cannot be compared element by element, return none.
    """
    filled = {name: array for name, array in weights.items() if math.prod(array.shape)}
    begins = {name: _beginning(array) for name, array in filled.items()}
    are_comparable = all(map(_beginning, masters)) and all(begins.values())
    if not are_comparable or len({array.dtype for array in filled.values()}) > 1:
        return set()
    values = read_runs(tree, filter(None, begins.values()))
    texts = {name: tuple(values[each].tolist()) for name, each in begins.items() if each}
    lengths = {len(text) for text in texts.values()}
    unlike = set[str]()
    whole, cut = set[tuple[float, ...]](), set[tuple[float, ...]]()
    for name, text in reversed(texts.items()):
        if text not in cut and not any(text[:length] in whole for length in lengths):
            unlike.add(name)
        whole.add(text)
        cut.update(text[:length] for length in lengths if length <= len(text))
    return unlike


def _beginning(array: StoredArray) -> StoredArray | None:
    run = find_flat_run(array, 0, array, 0, min(_BEGINNING, math.prod(array.shape)))
    return None if run is None else run[0]


def _windows(run: Run) -> list[tuple[int, int]]:
    """Return the starts and lengths of the parts of a run that are compared."""
    (size,) = run[0].shape
    if size <= _WINDOWS * _WINDOW:
        return [(0, size)]
    return [(i * (size - _WINDOW) // (_WINDOWS - 1), _WINDOW) for i in range(_WINDOWS)]


def _cut(run: Run, start: int, count: int) -> Run:
    count = min(count, run[0].shape[0] - start)
    return part_of_run(run[0], start, count), part_of_run(run[1], start, count)


def _require_same_counts(ranks: Sequence[OptimizerState], names: Sequence[str | None]) -> None:
    for rank in ranks:
        if len(rank.states) != len(names):
            raise FormatError(
                f"{rank.path}: the optimizer has state of {len(rank.states)} parameters, but of "
                f"{len(names)} in {ranks[0].path}: the files are from different saves: copy all "
                "files of one save"
            )


def _add_parameters(
    builder: Builder,
    ranks: Sequence[OptimizerState],
    names: Sequence[str | None],
    placement_rule: PlacementRule,
) -> None:
    first = ranks[0]
    for index, name in enumerate(names):
        if name is None:
            continue  # without state
        if first.masters:
            add_state(
                builder, name, MASTER, [rank.masters[index] for rank in ranks], placement_rule
            )
        for key, value in first.states[index].items():
            tensor = tensor_name(name, key)
            values: list[Any] = [rank.states[index].get(key) for rank in ranks]
            is_array = isinstance(value, StoredArray)
            for rank, other in zip(ranks, values, strict=True):
                if is_array and not isinstance(other, StoredArray):
                    raise FormatError(
                        f"{rank.path}: {tensor} is missing, which {first.path} has: the files are "
                        "from different saves: copy all files of one save"
                    )
            if not is_array and any(other != value for other in values):
                builder.left_out.append(f"{tensor}: ranks differ; the first one's is taken")
            add_state(builder, name, key, values if is_array else [value], placement_rule)


def assign_members(
    parameters: Sequence[tuple[str, Shape]],
    groups: Sequence[Group],
    agreeing: Agreement | None = None,
    unlike_later: Container[str] = frozenset(),
    most_prefixes: int = MOST_PREFIXES,
) -> list[list[str | None]] | None:
    """Return the names of the members of groups, if exactly one parameter can be each of them.

    Each group has its members in the order of the module. A parameter may be in no group: for
    example, if it is frozen.

    Args:
        parameters: the name and the shape of each parameter, in the module's order.
        groups: the groups, all flattened or none.
        agreeing: returns in which slots a parameter's values are; by default, in all of them.
        unlike_later: parameters whose values are not those of any later one. If they are in a slot,
            no other parameter can be in it.
        most_prefixes: the most prefixes to follow.

    Returns:
        The names in each group. The name of a member without state is None if several parameters
        can be this member. The result is None if there is no assignment, if several parameters can
        be a member with state, or if there are too many ways to follow.
    """
    followed = _follow(parameters, groups, agreeing, unlike_later, most_prefixes)
    if followed is None:
        return None
    # From the last parameter to the first, keep what leads to the end of all groups.
    candidates: dict[Slot, set[str]] = {}
    alive = {tuple(_length(group) for group in groups)}
    for (name, shape), (prefixes, slots) in zip(
        reversed(parameters), reversed(followed), strict=True
    ):
        before = set()
        for prefix in prefixes:
            for slot, after in _moves(prefix, shape, groups):
                if after in alive and (slot is None or slot in slots):
                    before.add(prefix)
                    if slot is not None:
                        candidates.setdefault(slot, set()).add(name)
        alive = before
    if not alive:
        return None
    shapes = dict(parameters)
    members = []
    for index, group in enumerate(groups):
        names = _names_of_members(index, group, candidates, shapes)
        if names is None:
            return None
        members.append(names)
    return members


def _follow(
    parameters: Sequence[tuple[str, Shape]],
    groups: Sequence[Group],
    agreeing: Agreement | None,
    unlike_later: Container[str],
    most_prefixes: int,
) -> list[tuple[set[Prefix], set[Slot]]] | None:
    """Return the prefixes that are possible before each parameter, and the slots it may take.

    Returns:
        None if there are too many.
    """
    is_flat = any(isinstance(group, int) for group in groups)
    needed = sum(map(_length, groups))
    left = sum(math.prod(shape) if is_flat else 1 for _, shape in parameters)
    prefixes: set[Prefix] = {(0,) * len(groups)}
    followed, count = [], 0
    for name, shape in parameters:
        moves = [move for prefix in prefixes for move in _moves(prefix, shape, groups)]
        slots = {slot for slot, _ in moves if slot is not None}
        if agreeing is not None and slots:
            if len(slots) > MOST_SLOTS:
                return None
            slots = agreeing(name, slots)
        followed.append((prefixes, slots))
        left -= math.prod(shape) if is_flat else 1
        is_last = agreeing is not None and name in unlike_later
        prefixes = {
            after
            for slot, after in moves
            if (slot is None or slot in slots)
            and needed - sum(after) <= left
            and not (is_last and not slots.isdisjoint(enumerate(after)))
        }
        count += len(prefixes)
        if count > most_prefixes:
            return None
    return followed


def _moves(
    prefix: Prefix, shape: Shape, groups: Sequence[Group]
) -> Iterator[tuple[Slot | None, Prefix]]:
    """Yield each slot that a parameter can take after a prefix, and the prefix after it.

    The slot None means that the parameter is in no group.
    """
    yield None, prefix
    for index, (group, position) in enumerate(zip(groups, prefix, strict=True)):
        if isinstance(group, int):
            taken = math.prod(shape)
            fits = 0 < taken <= group - position
        else:
            taken = 1
            fits = position < len(group) and group[position] in (shape, None)
        if fits:
            yield (index, position), (*prefix[:index], position + taken, *prefix[index + 1 :])


def _length(group: Group) -> int:
    return group if isinstance(group, int) else len(group)


def _names_of_members(
    index: int, group: Group, candidates: Mapping[Slot, set[str]], shapes: Mapping[str, Shape]
) -> list[str | None] | None:
    names: list[str | None] = []
    position = 0
    while position < _length(group):
        found = candidates.get((index, position), set())
        if len(found) == 1:
            (name,) = found
            names.append(name)
            position += math.prod(shapes[name]) if isinstance(group, int) else 1
        elif not isinstance(group, int) and group[position] is None:
            names.append(None)
            position += 1
        else:
            return None
    return names
