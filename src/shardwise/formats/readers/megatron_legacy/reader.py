"""Opens a legacy checkpoint of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import TypeAlias

from shardwise.errors import FormatError
from shardwise.formats.build import Builder
from shardwise.formats.foreign import Foreign, Row, catalogued
from shardwise.formats.language import apply_spec
from shardwise.formats.optimizers import GROUPS, Group
from shardwise.formats.readers.megatron_legacy.buffers import possible_bucketings
from shardwise.formats.readers.megatron_legacy.complete import (
    ITERATION,
    check_files,
    check_ranks,
)
from shardwise.formats.readers.megatron_legacy.files import Files, find_files, has_files
from shardwise.formats.readers.megatron_legacy.geometry import Geometry, geometry_of
from shardwise.formats.readers.megatron_legacy.optimizers import MASTER, State, optimizer_state
from shardwise.formats.readers.megatron_legacy.parameters import Parameter, parameters_of
from shardwise.formats.readers.megatron_legacy.ranks import Rank, listed_files, read_rank
from shardwise.formats.readers.megatron_legacy.values import add_values
from shardwise.formats.specs import shipped
from shardwise.formats.tree import Tree
from shardwise.manifest.table import Int

FORMAT = "legacy Megatron-LM"
SPEC = "megatron"
OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
UNTIED = "untie_embeddings_and_output_weights"
THREADS = 8

Mastered: TypeAlias = Mapping[tuple[int, ...], Mapping[str, str]]
"""Dtypes of masters, by name, of the chunks of stages: any rank's that has them."""


def recognise(tree: Tree) -> bool:
    """Whether a place has directories of ranks as Megatron-LM writes them."""
    return has_files(tree)


def read(tree: Tree) -> Foreign:
    """Read the latest iteration; no tensor is read.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing, or malformed.
        MismatchError: the model is none that the shipped specification knows.
    """
    files = find_files(tree)
    check_files(tree, files)
    ranks = _read_ranks(tree, files)
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
    builder = Builder(laid.files, laid.table, list(laid.left_out), list(laid.tensors))
    _add_groups(builder, laid, states)
    add_values(builder, ranks, states[0].beside)
    builder.left_out += [f"{name}: no file of a checkpoint" for name in files.others]
    step = ranks[0].values.get(ITERATION)
    return replace(
        builder.build(FORMAT),
        replicas=laid.replicas,
        replica_names=laid.replica_names,
        step=step if type(step) is int and step >= 0 else None,
        world_size=len(ranks),
    )


def _read_ranks(tree: Tree, files: Files) -> list[Rank]:
    counts = accumulate((len(own) for own in files.ranks.values()), initial=0)
    with ThreadPoolExecutor(THREADS, "shardwise-open") as pool:
        found = [
            pool.submit(read_rank, tree, numbers, own, first)
            for (numbers, own), first in zip(files.ranks.items(), counts, strict=False)
        ]
        return [each.result() for each in found]


def _states(ranks: Sequence[Rank], geometry: Geometry) -> list[State]:
    found = []
    for rank in ranks:
        bucketings = possible_bucketings(rank.args, geometry.pipeline(rank))
        found.append(optimizer_state(rank, parameters_of(rank), bucketings))
    unknown = next((state.unknown for state in found if state.unknown), "")
    # What some ranks have and others lack makes up no tensor.
    return [State(beside=each.beside, unknown=unknown) for each in found] if unknown else found


def _mastered(ranks: Sequence[Rank], states: Sequence[State], geometry: Geometry) -> Mastered:
    # Of experts' ranks, only the first has what the distributed optimizer has of the others.
    found: dict[tuple[int, ...], dict[str, str]] = {}
    for rank, state in zip(ranks, states, strict=True):
        for parameter, arrays in state.arrays.items():
            if MASTER in arrays:
                chunk = found.setdefault(geometry.chunk(rank, parameter.chunk), {})
                chunk[parameter.name] = arrays[MASTER].dtype
    return found


def _rows(rank: Rank, state: State, geometry: Geometry, mastered: Mastered) -> list[Row]:
    """The arrays of a rank, by the names that the specification has for them.

    The last pipeline stage of a tied model has a copy of the embedding as its output layer. It
    gets the embedding's name, as other stages would have it, and is compared with that.
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
    """Add param groups of all ranks, and numbers that parameters have as their state."""
    names = _names_at(laid)
    groups: dict[str, Group] = {}
    numbers: dict[str, float] = {}
    settings_of: dict[str, str] = {}

    def name_of(parameter: Parameter) -> str | None:
        return names.get((parameter.array.file, parameter.array.start))

    for state in states:
        for members, settings in state.groups:
            alike = repr(settings)
            known = groups.get(alike, Group((), settings))
            own = [name for each in members if (name := name_of(each)) is not None]
            for name in own:
                if settings_of.setdefault(name, alike) != alike:
                    raise FormatError(
                        f"{name}: ranks have different hyperparameters: {settings_of[name][:200]} "
                        f"and {alike[:200]}: their files are of different saves"
                    )
            groups[alike] = Group(tuple(dict.fromkeys((*known.members, *own))), settings)
        for parameter, held in state.numbers.items():
            name = name_of(parameter)
            for key, value in held.items() if name is not None else ():
                full = f"optimizer.{name}.{key}"
                if numbers.setdefault(full, value) != value:
                    raise FormatError(
                        f"{full}: it is {numbers[full]} on one rank, and {value} on another: their "
                        "files are of different saves"
                    )
    for name, value in numbers.items():
        builder.add_number(name, value)
    if groups:
        builder.add_groups(groups.values(), f"optimizer.{GROUPS}")
    if states[0].unknown:
        builder.left_out.append(f"optimizer.*: {states[0].unknown}")


def _names_at(laid: Foreign) -> dict[tuple[int, int], str]:
    """Names of parameters by the file and byte at which a rank's weights begin."""
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
