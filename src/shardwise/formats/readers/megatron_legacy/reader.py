"""Reads a legacy checkpoint of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.build import Builder, unlike_values
from shardwise.formats.containers.pickle_values import Name, Opaque, Record
from shardwise.formats.foreign import Foreign, Row, catalogued
from shardwise.formats.language import apply_spec
from shardwise.formats.optimizers import GROUPS, Group
from shardwise.formats.readers.megatron_legacy.files import find_files, has_files, require_files
from shardwise.formats.readers.megatron_legacy.optimizers import (
    MASTER,
    State,
    optimizer_state,
    possible_bucketings,
)
from shardwise.formats.readers.megatron_legacy.ranks import (
    ARGS,
    ITERATION,
    RNG,
    Geometry,
    Parameter,
    Rank,
    check_ranks,
    geometry_of,
    listed_files,
    parameters_of,
    read_ranks,
)
from shardwise.formats.specs import shipped
from shardwise.formats.tree import Tree
from shardwise.manifest.table import Int

FORMAT = "legacy Megatron-LM"
SPEC = "megatron"
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
UNTIED = "untie_embeddings_and_output_weights"

Mastered: TypeAlias = Mapping[tuple[int, ...], Mapping[str, str]]
"""The dtypes of master weights by name, for each chunk of the model."""


def recognise(tree: Tree) -> bool:
    """Return whether a place has directories of ranks as Megatron-LM writes them."""
    return has_files(tree)


def read(tree: Tree) -> Foreign:
    """Read the latest iteration; no tensor is read.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing or malformed.
        MismatchError: the built-in specification does not know the model.
    """
    files = find_files(tree)
    require_files(tree, files)
    ranks = read_ranks(tree, files)
    check_ranks(tree, files, ranks)
    geometry = geometry_of(ranks, str(tree))
    states = _states(ranks, geometry)
    mastered = _mastered(ranks, states, geometry)
    rows = [
        row
        for rank, state in zip(ranks, states, strict=True)
        for row in _rows(rank, state, geometry, mastered)
    ]
    catalogue = catalogued(listed_files(tree, files), geometry.axes, rows)
    laid = apply_spec(shipped(SPEC), catalogue, sizes={"gates": geometry.gates})
    builder = Builder.of(laid)
    _add_groups(builder, laid, states)
    _add_values(builder, ranks, states[0].others)
    builder.left_out += [f"{name}: not a file of a checkpoint" for name in files.others]
    step = ranks[0].values.get(ITERATION)
    return builder.build(
        FORMAT,
        step=step if type(step) is int and step >= 0 else None,
        world_size=len(ranks),
        replica_names=laid.replica_names,
    )


def _states(ranks: Sequence[Rank], geometry: Geometry) -> list[State]:
    found = []
    for rank in ranks:
        bucketings = possible_bucketings(rank.args, geometry.pipeline(rank))
        found.append(optimizer_state(rank, parameters_of(rank), bucketings))
    unknown = next((state.unknown for state in found if state.unknown), "")
    # State that some ranks lack does not make up whole tensors.
    return [State(others=each.others, unknown=unknown) for each in found] if unknown else found


def _mastered(ranks: Sequence[Rank], states: Sequence[State], geometry: Geometry) -> Mastered:
    # The distributed optimizer saves state that several expert ranks share on the first of them.
    found: dict[tuple[int, ...], dict[str, str]] = {}
    for rank, state in zip(ranks, states, strict=True):
        for parameter, arrays in state.arrays.items():
            if MASTER in arrays:
                chunk = found.setdefault(geometry.chunk(rank, parameter.chunk), {})
                chunk[parameter.name] = arrays[MASTER].dtype
    return found


def _rows(rank: Rank, state: State, geometry: Geometry, mastered: Mastered) -> list[Row]:
    """Return the arrays of a rank, by the names that the specification has for them.

    The last pipeline stage of a tied model has a copy of the embedding as its output layer. It gets
    the embedding's name, so that it is compared with the embedding as a replica.
    """
    rows: list[Row] = []
    tied = {OUTPUT: EMBEDDING} if rank.args.get(UNTIED) is False else {}
    for number, chunk in enumerate(rank.chunks):
        at = geometry.coordinate(rank, number)
        masters = mastered.get(geometry.chunk(rank, number), {})
        for name, array in chunk.items():
            trained = masters.get(name, array.dtype) == array.dtype
            name = tied.get(name, name)
            rows.append((name if trained else f"module.{name}", array, at))
    for parameter, arrays in state.arrays.items():
        at = geometry.coordinate(rank, parameter.chunk)
        for key, array in arrays.items():
            name = tied.get(parameter.name, parameter.name)
            rows.append((name if key == MASTER else f"optimizer.{name}.{key}", array, at))
    return rows


def _add_groups(builder: Builder, laid: Foreign, states: Sequence[State]) -> None:
    """Add the param groups of all ranks, and numbers in the state of parameters."""
    names = _names_at(laid)
    groups: dict[str, Group] = {}
    numbers: dict[str, float] = {}
    settings_of: dict[str, str] = {}

    def name_of(parameter: Parameter) -> str | None:
        return names.get((parameter.array.file, parameter.array.start))

    for state in states:
        for members, settings in state.groups:
            same = repr(settings)
            known = groups.get(same, Group((), settings))
            own = [name for each in members if (name := name_of(each)) is not None]
            for name in own:
                if settings_of.setdefault(name, same) != same:
                    raise FormatError(
                        f"{name}: ranks have different hyperparameters, {settings_of[name][:200]} "
                        f"and {same[:200]}: their files are from different saves"
                    )
            groups[same] = Group(tuple(dict.fromkeys((*known.members, *own))), settings)
        for parameter, held in state.numbers.items():
            name = name_of(parameter)
            for key, value in held.items() if name is not None else ():
                full = f"optimizer.{name}.{key}"
                if numbers.setdefault(full, value) != value:
                    raise FormatError(
                        f"{full}: {numbers[full]} on one rank and {value} on another: their files "
                        "are from different saves"
                    )
    for name, value in numbers.items():
        builder.add_number(name, value)
    if groups:
        builder.add_groups(groups.values(), f"optimizer.{GROUPS}")
    if states[0].unknown:
        builder.left_out.append(f"optimizer.*: {states[0].unknown}")


def _names_at(laid: Foreign) -> dict[tuple[int, int], str]:
    """Return the names of parameters by the file and byte at which a rank's weights begin."""
    found: dict[tuple[int, int], str] = {}
    tables: list[tuple[Int, Int, Int]] = [
        (table.pieces.file, table.pieces.start, table.pieces.tensor)
        for table in (laid.table, laid.replicas)
    ]
    for columns in tables:
        for file, start, tensor in zip(*(column.tolist() for column in columns), strict=True):
            kind, _, name = laid.tensors[tensor].name.partition(".")
            if kind in ("model", "module"):
                found[file, start] = name
    return found


def _add_values(builder: Builder, ranks: Sequence[Rank], others: Mapping[str, Any]) -> None:
    """Add the plain values of the first rank, and random generator states of all ranks.

    Args:
        others: values of the first rank's optimizer that are not state of parameters.
    """
    first = ranks[0]
    apart = {RNG: None}
    builder.left_out += unlike_values([{**rank.values, **apart} for rank in ranks])
    if first.args:
        builder.add_value(ARGS, _plain_args(builder, first.args))
    for name, value in {**first.values, **others}.items():
        if name != RNG:
            builder.add_value(name, value)
    for rank in ranks:
        if RNG in rank.values:
            folder = rank.where.rpartition("/")[2]
            builder.add_value(f"{RNG}.{folder}", rank.values[RNG])
    kinds = dict.fromkeys(name.rpartition(".")[2] for rank in ranks for name in rank.unread)
    for kind in kinds:
        names = [n for rank in ranks for n in rank.unread if n.rpartition(".")[2] == kind]
        builder.left_out.append(f"{names[0]} and {len(names) - 1} more: not arrays")


def _plain_args(builder: Builder, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have a plain form; functions and others are left out by name."""
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
