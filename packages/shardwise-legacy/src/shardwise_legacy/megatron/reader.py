"""Reads a legacy checkpoint of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import shardwise as sw
from shardwise.parts.formats.reader import (
    Builder,
    FileTree,
    FormatError,
    ParamGroup,
    Reader,
    Run,
    StoredArray,
    UnknownObject,
    describe_wrong_masters,
    find_common_run,
    find_wrong_masters,
)
from shardwise_legacy.megatron.optimizers import (
    MASTER,
    RankOptimizer,
    UnassignedStateError,
    list_bucketings,
    take_optimizer_state,
)
from shardwise_legacy.megatron.ranks import (
    ARGS,
    BUFFERS_FILE,
    EMBEDDING,
    GROUPS,
    ITERATION,
    NEEDED_BY,
    OUTPUT,
    PARAMS,
    RNG,
    UNTIED,
    DirectoryNumbers,
    IterationFiles,
    Parameter,
    Rank,
    count_chunks_and_gates,
    find_files,
    find_sizes,
    has_rank_files,
    parameters_of,
    read_ranks,
    require_files,
)

_OF_WEIGHTS = ("model.", "module.")
_SPECIFICATION = Path(__file__).with_name("megatron.spec")

Row: TypeAlias = tuple[str, StoredArray, tuple[int, ...]]
"""The name of an array, the array, and the coordinate of its rank along each axis."""
MasterDtypes: TypeAlias = Mapping[tuple[int, ...], Mapping[str, str]]
"""For each chunk of the model, the dtypes of master weights by name."""


def read(tree: FileTree, builder: Builder) -> None:
    """Read the latest iteration; no tensor is read.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing or malformed.
        MismatchError: the specification does not know the model.
    """
    # Late, because this module is imported for checkpoints of other formats, too.
    from shardwise.parts.formats.specification import add_by_specification

    files = find_files(tree)
    require_files(tree, files)
    ranks = read_ranks(tree, files)
    sizes = find_sizes(tree, files, ranks)
    _check_ranks(tree, files, ranks)
    chunks, gates = count_chunks_and_gates(ranks, str(tree))
    _refuse_unsupported(ranks[0], sizes)
    optimizers = _find_optimizers(tree, ranks, sizes["pp"], builder.left_out)
    master_dtypes = _find_master_dtypes(ranks, optimizers)
    rows = [
        row
        for rank, optimizer in zip(ranks, optimizers, strict=True)
        for row in _rows_of_rank(rank, optimizer, master_dtypes)
    ]
    axes = {**sizes, "vp": chunks}
    for paths in files.ranks.values():
        for path in paths.values():
            builder.add_file(path)
    names = add_by_specification(
        builder, sw.spec(_SPECIFICATION).rules, axes, rows, {"gates": gates}
    )
    _add_param_groups(builder, names, optimizers)
    _add_values(builder, tree, ranks, optimizers[0].values)
    builder.left_out += [f"{name}: not a file of a checkpoint" for name in files.others]
    builder.step = ranks[0].values.get(ITERATION)
    builder.world_size = len(ranks)


def _check_ranks(tree: FileTree, files: IterationFiles, ranks: Sequence[Rank]) -> None:
    """Check that no buffer is missing, no directory was renamed, and all are from one iteration."""
    without_buffers = [
        rank.numbers
        for rank in ranks
        if rank.buffers is None
        and any(group.get(PARAMS) is None for part in rank.optimizer for group in part.groups)
    ]
    tree.require((files.path_of(numbers, BUFFERS_FILE) for numbers in without_buffers), NEEDED_BY)
    _check_rank_order(tree, {rank.numbers: rank for rank in ranks})
    _check_iterations(tree, ranks)


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


def _refuse_unsupported(rank: Rank, sizes: Mapping[str, int]) -> None:
    expert_size = rank.args.get("expert_tensor_parallel_size")
    has_experts = any(".experts." in name for chunk in rank.chunks for name in chunk)
    if has_experts and type(expert_size) is int and expert_size != sizes["tp"]:
        raise FormatError(
            f"{rank.path}: experts are divided among {expert_size} ranks and the rest among "
            f"{sizes['tp']} (expert_tensor_parallel_size), which is not supported: "
            "convert the checkpoint to torch_dist with Megatron-LM, and open the result"
        )
    version = rank.values.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2:
        raise FormatError(
            f"{rank.path}: checkpoint version {version} orders queries, keys and values "
            "differently; only versions from 2.0 are supported: load and save the checkpoint with "
            "a newer Megatron-LM"
        )


def _find_optimizers(
    tree: FileTree, ranks: Sequence[Rank], stages: int, left_out: list[str]
) -> list[RankOptimizer]:
    """Return the optimizer state of each rank.

    If it cannot be assigned to parameters on one rank, or if master weights contradict the weights,
    it is left out on all ranks: state that some ranks lack does not make up whole tensors.
    """
    optimizers = [RankOptimizer() for _ in ranks]
    try:
        for rank, optimizer in zip(ranks, optimizers, strict=True):
            bucketings = list_bucketings(rank.args, rank.position[1], stages)
            take_optimizer_state(optimizer, rank, parameters_of(rank), bucketings)
    except UnassignedStateError as error:
        left_out.append(f"optimizer.*: {rank.path}: {error}")
        return [RankOptimizer(values=each.values) for each in optimizers]
    if wrong := find_wrong_masters(tree, _runs_of_masters(optimizers)):
        left_out.append(describe_wrong_masters(wrong))
        return [RankOptimizer(values=each.values) for each in optimizers]
    return optimizers


def _runs_of_masters(optimizers: Iterable[RankOptimizer]) -> Iterator[tuple[str, Run]]:
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            master, weights = state.get(MASTER), parameter.array
            if isinstance(master, StoredArray) and master.shape == weights.shape:
                origin = (0,) * len(weights.shape)
                if run := find_common_run(origin, master, origin, weights):
                    yield parameter.name, run


def _find_master_dtypes(ranks: Sequence[Rank], optimizers: Sequence[RankOptimizer]) -> MasterDtypes:
    # The distributed optimizer saves state that several expert ranks share on the first of them.
    dtypes: dict[tuple[int, ...], dict[str, str]] = {}
    for rank, optimizer in zip(ranks, optimizers, strict=True):
        for parameter, state in optimizer.state.items():
            if isinstance(master := state.get(MASTER), StoredArray):
                coordinate = (*rank.position[:2], parameter.chunk)
                dtypes.setdefault(coordinate, {})[parameter.name] = master.dtype
    return dtypes


def _rows_of_rank(rank: Rank, optimizer: RankOptimizer, master_dtypes: MasterDtypes) -> list[Row]:
    """Return the arrays of a rank under the names that the specification uses.

    The last pipeline stage of a tied model has a copy of the embedding as its output layer. It gets
    the embedding's name, so that it is compared with the embedding as a replica.
    """
    rows: list[Row] = []
    ties = {OUTPUT: EMBEDDING} if rank.args.get(UNTIED) is False else {}
    for chunk, chunk_arrays in enumerate(rank.chunks):
        coordinate = (*rank.position, chunk)
        dtypes = master_dtypes.get((*rank.position[:2], chunk), {})
        for name, array in chunk_arrays.items():
            is_trained = dtypes.get(name, array.dtype) == array.dtype
            name = ties.get(name, name)
            rows.append((name if is_trained else f"module.{name}", array, coordinate))
    for parameter, state in optimizer.state.items():
        coordinate = (*rank.position, parameter.chunk)
        name = ties.get(parameter.name, parameter.name)
        for key, value in state.items():
            if isinstance(value, StoredArray):
                name_of_state = name if key == MASTER else f"optimizer.{name}.{key}"
                rows.append((name_of_state, value, coordinate))
    return rows


def _add_param_groups(
    builder: Builder,
    names: Mapping[tuple[str, int], Sequence[str]],
    optimizers: Sequence[RankOptimizer],
) -> None:
    """Add the param groups of all ranks, and numbers in the state of parameters."""
    groups: list[ParamGroup] = []
    scalars: dict[str, float] = {}
    settings_key_by_name: dict[str, str] = {}

    def name_of(parameter: Parameter) -> str | None:
        tensors = names.get((parameter.array.file, parameter.array.start), ())
        return next((n.partition(".")[2] for n in tensors if n.startswith(_OF_WEIGHTS)), None)

    for optimizer in optimizers:
        for members, hyperparameters in optimizer.groups:
            settings_key = repr(sorted(hyperparameters.items()))
            member_names = [name for each in members if (name := name_of(each)) is not None]
            for name in member_names:
                if settings_key_by_name.setdefault(name, settings_key) != settings_key:
                    raise FormatError(
                        f"{name}: ranks have different hyperparameters, "
                        f"{settings_key_by_name[name][:200]} and {settings_key[:200]}: their files "
                        "are from different saves: copy all files of one save"
                    )
            groups.append(ParamGroup(tuple(member_names), hyperparameters))
        for parameter, state in optimizer.state.items():
            parameter_name = name_of(parameter)
            for key, value in state.items() if parameter_name is not None else ():
                tensor = f"optimizer.{parameter_name}.{key}"
                if isinstance(value, StoredArray):
                    continue
                if scalars.setdefault(tensor, value) != value:
                    raise FormatError(
                        f"{tensor}: {scalars[tensor]} on one rank and {value} on another: their "
                        "files are from different saves: copy all files of one save"
                    )
    for tensor, value in scalars.items():
        builder.add_number(tensor, value)
    if groups:
        builder.add_groups(groups, f"optimizer.{GROUPS}", merge=True)


def _add_values(
    builder: Builder, tree: FileTree, ranks: Sequence[Rank], optimizer_values: Mapping[str, Any]
) -> None:
    """Add the plain values of the first rank, and random generator states of all ranks.

    Args:
        optimizer_values: values of the first rank's optimizer that are not state of parameters.
    """
    first = ranks[0]
    if first.args:
        builder.add_value(ARGS, _select_plain_args(builder, first.args))
    builder.add_values([{k: v for k, v in rank.values.items() if k != RNG} for rank in ranks])
    for name, value in optimizer_values.items():
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
        if isinstance(value, UnknownObject):
            builder.left_out.append(f"{ARGS}.{name}: {value.reason}")
        else:
            plain[name] = value
    return plain


READER = Reader("legacy Megatron-LM", has_rank_files, read)
