"""Reads a legacy checkpoint of Megatron-LM."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from shardwise.formats.containers.pickle_parts import find_unknown
from shardwise.formats.file_tree import MOST_FILES
from shardwise.formats.foreign import CatalogueRow, build_catalogue
from shardwise.formats.language import apply_spec
from shardwise.formats.optimizers import (
    GROUPS,
    PARAMS,
    make_hyperparameters_key,
    merge_param_groups,
)
from shardwise.formats.readers.megatron_legacy.optimizers import (
    MASTER,
    RankOptimizer,
    find_optimizer_state,
    list_bucketings,
)
from shardwise.formats.readers.megatron_legacy.ranks import (
    ARGS,
    BUFFERS_FILE,
    EMBEDDING,
    ITERATION,
    MODEL_FILE,
    NEEDED_BY,
    OLD_MODEL_FILE,
    OPTIMIZER,
    OUTPUT,
    RNG,
    SIZE_ARGS,
    UNTIED,
    DirectoryNumbers,
    Geometry,
    IterationFiles,
    Parameter,
    Rank,
    directory_axes,
    find_files,
    find_geometry,
    has_rank_files,
    list_files,
    parameters_of,
    read_ranks,
    require_files,
)
from shardwise.formats.specs import load_builtin
from shardwise.formats.values import describe_differing_values
from shardwise.layout.columns import Int
from shardwise.manifest.layout import Layout
from shardwise.ports.reader import Builder, FileTree, FormatError, ParamGroup, Reader

FORMAT = "legacy Megatron-LM"
SPEC_NAME = "megatron"

MasterDtypes: TypeAlias = Mapping[tuple[int, ...], Mapping[str, str]]
"""For each chunk of the model, the dtypes of master weights by name."""


def recognise(tree: FileTree) -> bool:
    """Return whether a place has directories of ranks as Megatron-LM writes them."""
    return has_rank_files(tree)


def read(tree: FileTree, builder: Builder) -> None:
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
    geometry = find_geometry(ranks, str(tree))
    _refuse_unsupported(ranks[0], geometry)
    optimizers = _find_optimizers(ranks, geometry)
    master_dtypes = _find_master_dtypes(ranks, optimizers, geometry)
    rows = [
        row
        for rank, optimizer in zip(ranks, optimizers, strict=True)
        for row in _rows_of_rank(rank, optimizer, geometry, master_dtypes)
    ]
    catalogue = build_catalogue(list_files(tree, files), geometry.sizes, rows)
    assembled = apply_spec(
        load_builtin(SPEC_NAME), catalogue, sizes={"gates": geometry.gates}, checkpoint=str(tree)
    )
    builder.add_layout(assembled)
    _add_param_groups(builder, assembled, optimizers)
    _add_values(builder, tree, ranks, optimizers[0].values)
    builder.left_out += [f"{name}: not a file of a checkpoint" for name in files.others]
    step = ranks[0].values.get(ITERATION)
    builder.step = step if type(step) is int and step >= 0 else None
    builder.world_size = len(ranks)


def check_ranks(tree: FileTree, files: IterationFiles, ranks: Sequence[Rank]) -> None:
    """Check that no rank is missing, no directory was renamed, and all are from one iteration.

    Raises:
        FormatError: a check fails; the message names the files.
    """
    first = ranks[0]
    sizes_found = [
        max(column) + 1 for column in zip(*(rank.numbers for rank in ranks), strict=True)
    ]
    sizes_recorded = [first.args.get(SIZE_ARGS[axis]) for axis in directory_axes(first)]
    sizes = [
        max(n, m) if type(m) is int else n for n, m in zip(sizes_found, sizes_recorded, strict=True)
    ]
    if math.prod(sizes) > MOST_FILES:
        raise FormatError(
            f"{tree}: directories and saved arguments say that {' × '.join(map(str, sizes))} "
            f"ranks saved this checkpoint, but at most {MOST_FILES} files are supported: copy the "
            "checkpoint again from an intact source"
        )
    model_file = MODEL_FILE if MODEL_FILE in files.ranks[first.numbers] else OLD_MODEL_FILE
    required = (files.path_of(numbers, model_file) for numbers in product(*map(range, sizes)))
    tree.require(required, NEEDED_BY)
    without_buffers = [
        rank.numbers for rank in ranks if rank.buffers is None and _needs_buffers(rank.optimizer)
    ]
    tree.require((files.path_of(numbers, BUFFERS_FILE) for numbers in without_buffers), NEEDED_BY)
    _check_rank_order(tree, {rank.numbers: rank for rank in ranks})
    _check_iterations(tree, ranks)


def _needs_buffers(optimizer: object) -> bool:
    """Return whether an optimizer has its state in the buffers of another file."""
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    return any(
        isinstance(group, dict) and group.get(PARAMS) is None
        for part in parts
        for group in _param_groups_of(part)
    )


def _param_groups_of(part: object) -> Iterator[object]:
    inner = part.get(OPTIMIZER, part) if isinstance(part, dict) else None
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    yield from groups if isinstance(groups, list) else []


def _check_iterations(tree: FileTree, ranks: Sequence[Rank]) -> None:
    """Require that all ranks saved after the same iteration."""
    first = ranks[0]
    for rank in ranks:
        iteration, expected = (each.values.get(ITERATION) for each in (rank, first))
        if iteration != expected:
            raise FormatError(
                f"{tree}: the directories are from different saves: {first.path} is from "
                f"iteration {expected!r}, and {rank.path} from iteration {iteration!r}. Copy all "
                "directories of one save from a complete copy of the checkpoint, or open another"
            )


def _check_rank_order(tree: FileTree, ranks: Mapping[DirectoryNumbers, Rank]) -> None:
    """Require that the recorded global rank grows with the directory's number along each axis.

    This holds for every order of the axes. Tools that convert checkpoints record the same rank in
    all files, or none; then nothing is checked.
    """
    global_ranks = {numbers: rank.args.get("rank") for numbers, rank in ranks.items()}
    if len({*global_ranks.values()}) < len(global_ranks):
        return
    for numbers, rank in global_ranks.items():
        for axis in range(len(numbers)):
            numbers_before = (*numbers[:axis], numbers[axis] - 1, *numbers[axis + 1 :])
            other = global_ranks.get(numbers_before)
            if type(rank) is int and type(other) is int and rank < other:
                raise FormatError(
                    f"{tree}: directories were renamed: {ranks[numbers_before].path} was written "
                    f"by rank {other}, and {ranks[numbers].path}, which comes after it, by rank "
                    f"{rank}. Rename them back, or copy all directories from an intact source"
                )


def _refuse_unsupported(rank: Rank, geometry: Geometry) -> None:
    expert_size = rank.args.get("expert_tensor_parallel_size")
    has_experts = any(".experts." in name for chunk in rank.chunks for name in chunk)
    if has_experts and type(expert_size) is int and expert_size != geometry.sizes["tp"]:
        raise FormatError(
            f"{rank.path}: experts are divided among {expert_size} ranks and the rest among "
            f"{geometry.sizes['tp']} (expert_tensor_parallel_size), which is not supported: "
            "convert the checkpoint to torch_dist with Megatron-LM, and open the result"
        )
    version = rank.values.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2:
        raise FormatError(
            f"{rank.path}: checkpoint version {version} orders queries, keys and values "
            "differently; only versions from 2.0 are supported: load and save the checkpoint with "
            "a newer Megatron-LM"
        )


def _find_optimizers(ranks: Sequence[Rank], geometry: Geometry) -> list[RankOptimizer]:
    """Return the optimizer state of each rank.

    If it cannot be assigned to parameters on one rank, it is left out on all: state that some ranks
    lack does not make up whole tensors.
    """
    optimizers = []
    for rank in ranks:
        stage, stages = geometry.stage_of(rank), geometry.sizes["pp"]
        bucketings = list_bucketings(rank.args, stage, stages)
        optimizers.append(find_optimizer_state(rank, parameters_of(rank), bucketings))
    reason = next((each.reason_unassigned for each in optimizers if each.reason_unassigned), "")
    if not reason:
        return optimizers
    return [RankOptimizer(values=each.values, reason_unassigned=reason) for each in optimizers]


def _find_master_dtypes(
    ranks: Sequence[Rank], optimizers: Sequence[RankOptimizer], geometry: Geometry
) -> MasterDtypes:
    # The distributed optimizer saves state that several expert ranks share on the first of them.
    dtypes: dict[tuple[int, ...], dict[str, str]] = {}
    for rank, optimizer in zip(ranks, optimizers, strict=True):
        for parameter, arrays in optimizer.arrays.items():
            if MASTER in arrays:
                coordinate = geometry.coordinate_without_expert(rank, parameter.chunk)
                dtypes.setdefault(coordinate, {})[parameter.name] = arrays[MASTER].dtype
    return dtypes


def _rows_of_rank(
    rank: Rank, optimizer: RankOptimizer, geometry: Geometry, master_dtypes: MasterDtypes
) -> list[CatalogueRow]:
    """Return the arrays of a rank under the names that the specification uses.

    The last pipeline stage of a tied model has a copy of the embedding as its output layer. It gets
    the embedding's name, so that it is compared with the embedding as a replica.
    """
    rows: list[CatalogueRow] = []
    ties = {OUTPUT: EMBEDDING} if rank.args.get(UNTIED) is False else {}
    for chunk, chunk_arrays in enumerate(rank.chunks):
        coordinate = geometry.coordinate_of(rank, chunk)
        dtypes = master_dtypes.get(geometry.coordinate_without_expert(rank, chunk), {})
        for name, array in chunk_arrays.items():
            is_trained = dtypes.get(name, array.dtype) == array.dtype
            name = ties.get(name, name)
            rows.append((name if is_trained else f"module.{name}", array, coordinate))
    for parameter, arrays in optimizer.arrays.items():
        coordinate = geometry.coordinate_of(rank, parameter.chunk)
        name = ties.get(parameter.name, parameter.name)
        for key, array in arrays.items():
            rows.append((name if key == MASTER else f"optimizer.{name}.{key}", array, coordinate))
    return rows


def _add_param_groups(
    builder: Builder, assembled: Layout, optimizers: Sequence[RankOptimizer]
) -> None:
    """Add the param groups of all ranks, and numbers in the state of parameters."""
    names = _names_by_start(assembled)
    groups: list[ParamGroup] = []
    scalars: dict[str, float] = {}
    settings_key_by_name: dict[str, str] = {}

    def name_of(parameter: Parameter) -> str | None:
        return names.get((parameter.array.file, parameter.array.start))

    for optimizer in optimizers:
        for members, hyperparameters in optimizer.groups:
            settings_key = make_hyperparameters_key(hyperparameters)
            member_names = [name for each in members if (name := name_of(each)) is not None]
            for name in member_names:
                if settings_key_by_name.setdefault(name, settings_key) != settings_key:
                    raise FormatError(
                        f"{name}: ranks have different hyperparameters, "
                        f"{settings_key_by_name[name][:200]} and {settings_key[:200]}: their files "
                        "are from different saves: copy all files of one save"
                    )
            groups.append(ParamGroup(tuple(member_names), hyperparameters))
        for parameter, values in optimizer.scalars.items():
            parameter_name = name_of(parameter)
            for key, value in values.items() if parameter_name is not None else ():
                tensor = f"optimizer.{parameter_name}.{key}"
                if scalars.setdefault(tensor, value) != value:
                    raise FormatError(
                        f"{tensor}: {scalars[tensor]} on one rank and {value} on another: their "
                        "files are from different saves: copy all files of one save"
                    )
    for tensor, value in scalars.items():
        builder.add_number(tensor, value)
    if groups:
        builder.add_groups(merge_param_groups(groups), f"optimizer.{GROUPS}")
    if optimizers[0].reason_unassigned:
        builder.left_out.append(f"optimizer.*: {optimizers[0].reason_unassigned}")


def _names_by_start(assembled: Layout) -> dict[tuple[str, int], str]:
    """Return the names of parameters by the file and offset at which a rank's weights begin."""
    names: dict[tuple[str, int], str] = {}
    tables: list[tuple[Int, Int, Int]] = [
        (pieces.file, pieces.start, pieces.tensor)
        for pieces in (assembled.pieces, assembled.replicas)
    ]
    for columns in tables:
        for file, start, tensor in zip(*(column.tolist() for column in columns), strict=True):
            prefix, _, name = assembled.tensors[tensor].name.partition(".")
            if prefix in ("model", "module"):
                names[assembled.files[file].name, start] = name
    return names


def _add_values(
    builder: Builder, tree: FileTree, ranks: Sequence[Rank], optimizer_values: Mapping[str, Any]
) -> None:
    """Add the plain values of the first rank, and random generator states of all ranks.

    Args:
        optimizer_values: values of the first rank's optimizer that are not state of parameters.
    """
    first = ranks[0]
    builder.left_out += describe_differing_values([{**rank.values, RNG: None} for rank in ranks])
    if first.args:
        builder.add_value(ARGS, _select_plain_args(builder, first.args))
    for name, value in {**first.values, **optimizer_values}.items():
        if name != RNG:
            builder.add_value(name, value)
    for rank in ranks:
        if RNG in rank.values:
            directory = tree.relative_path(rank.path).rpartition("/")[2]
            builder.add_value(f"{RNG}.{directory}", rank.values[RNG])
    unread: dict[str, list[str]] = {}
    for name in (name for rank in ranks for name in rank.unread):
        unread.setdefault(name.rpartition(".")[2], []).append(name)
    for names in unread.values():
        builder.left_out.append(f"{names[0]} and {len(names) - 1} more: not arrays")


def _select_plain_args(builder: Builder, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that have a plain form; functions and others are left out by name."""
    plain = {}
    for name, value in args.items():
        unknown = find_unknown(value)
        if unknown is None:
            plain[name] = value
        else:
            builder.left_out.append(f"{ARGS}.{name}: {unknown.name} is not read from pickles")
    return plain


READER = Reader(FORMAT, recognise, read)
