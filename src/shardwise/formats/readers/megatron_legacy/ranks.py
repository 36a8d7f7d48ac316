"""Reads the files of all ranks, and derives which parallel ranks there are."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Record
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import ForeignFile, StoredArray
from shardwise.formats.optimizers import GROUPS, PARAMS
from shardwise.formats.readers.megatron_legacy.files import (
    FLAT,
    MODEL,
    OLD_MODEL,
    OLD_OPTIMIZER,
    WROTE,
    Files,
    Numbers,
    path_of,
)
from shardwise.formats.tree import MOST_FILES, Tree

ARGS, OPTIMIZER, RNG = "args", "optimizer", "rng_state"
_BUFFERS = ("_extra_state", "expert_bias", "inv_freq", "local_tokens_per_expert")
_EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight")
_CHUNK = re.compile(r"model(\d{0,4})")
ITERATION = "iteration"
_FIRST, _SECOND = ("linear_fc1", "dense_h_to_4h"), ("linear_fc2", "dense_4h_to_h")
ARGS_OF_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}

Arrays = Mapping[str, StoredArray]


@dataclass(frozen=True, slots=True)
class Rank:
    """The contents of one model-parallel rank's files.

    Attributes:
        numbers: the numbers in the name of its directory.
        where: the path of its directory.
        chunks: the chunks of the model, one unless stages are interleaved: arrays by name.
        optimizer: the optimizer as it was saved, or None.
        flat: the buffers of the distributed optimizer as they were saved, or None.
        args: the program's arguments by name.
        values: everything else.
        unread: names of values in the chunks that are not arrays.
    """

    numbers: Numbers
    where: str
    chunks: Sequence[Arrays]
    optimizer: Any
    flat: Any
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    unread: Sequence[str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a rank: the number of its chunk of the model, its name there, its weight."""

    chunk: int
    name: str
    array: StoredArray

    @property
    def of_expert(self) -> bool:
        """Whether it belongs to an expert, which only some data-parallel ranks have."""
        return ".experts." in self.name

    @property
    def decays(self) -> bool:
        """Whether Megatron-LM applies weight decay to it: it does except for biases and norms."""
        return len(self.array.shape) != 1 and not self.name.endswith(".bias")

    @property
    def of_embedding(self) -> bool:
        """Whether it can have a separate learning rate."""
        return self.name.endswith(_EMBEDDINGS)


def parameters_of(rank: Rank) -> list[Parameter]:
    """Return the parameters of a rank, in the module's order."""
    return [
        Parameter(chunk, name, array)
        for chunk, arrays in enumerate(rank.chunks)
        for name, array in arrays.items()
        if not name.endswith(_BUFFERS)
    ]


def listed_files(tree: Tree, files: Files) -> tuple[ForeignFile, ...]:
    """Return the files of all ranks; arrays count them."""
    return tuple(tree.file(path) for own in files.ranks.values() for path in own.values())


def read_ranks(tree: Tree, files: Files) -> list[Rank]:
    """Read the files of all ranks, in parallel; no array is read.

    Raises:
        FormatError: a file is malformed.
    """
    numbers = {file.name: number for number, file in enumerate(listed_files(tree, files))}
    values = tree.read_each(numbers, lambda part: read_torch_file(part, opaque=True).value)
    return [
        _rank(tree, rank, {name: (path, values[path]) for name, path in own.items()})
        for rank, own in files.ranks.items()
    ]


def _rank(tree: Tree, numbers: Numbers, found: Mapping[str, tuple[str, Any]]) -> Rank:
    """Return the contents of a rank's files, given their paths and values by name."""
    held: dict[str, Mapping[Any, Any]] = {}
    flat = None
    where = ""
    for name, (path, value) in found.items():
        if name == FLAT:
            flat = value
        elif not isinstance(value, dict):
            raise FormatError(f"{tree}/{path}: the file does not hold a dict")
        else:
            held[name] = value
            where = f"{tree}/{path}".rpartition("/")[0] if name in (MODEL, OLD_MODEL) else where
    state = {**held.get(OLD_OPTIMIZER, {}), **held.get(OLD_MODEL, {}), **held.get(MODEL, {})}
    chunks = _chunks(state, where)
    parts = [dict(_leaves(chunk, "")) for chunk in chunks.values()]
    arrays = [{n: v for n, v in part.items() if isinstance(v, StoredArray)} for part in parts]
    unread = [n for part in parts for n, v in part.items() if not isinstance(v, StoredArray)]
    args = state.get(ARGS)
    fields = args.fields if isinstance(args, Record) else args if isinstance(args, dict) else {}
    apart = {ARGS, OPTIMIZER, *chunks}
    values = {str(key): value for key, value in state.items() if key not in apart}
    return Rank(numbers, where, arrays, state.get(OPTIMIZER), flat, fields, values, unread)


def _chunks(state: Mapping[Any, Any], where: str) -> dict[str, Mapping[Any, Any]]:
    found: dict[int, str] = {}
    for key in state:
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            found[int(match[1] or 0)] = key
    if sorted(found) != list(range(len(found))) or not found:
        raise FormatError(f"{where}: the model, or a chunk of it, is missing")
    chunks = {found[number]: state[found[number]] for number in sorted(found)}
    for key, chunk in chunks.items():
        if not isinstance(chunk, dict):
            raise FormatError(f"{where}: {key} is not a dict")
    return chunks


def _leaves(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by dotted names; Megatron's old models are nested."""
    for key, each in value.items():
        name = f"{path}{key}"
        if isinstance(each, dict):
            yield from _leaves(each, f"{name}.")
        else:
            yield name, each


@dataclass(frozen=True, slots=True)
class Geometry:
    """The axes of the parallel ranks.

    Attributes:
        axes: the sizes of tp, pp, ep, and of vp, the chunks of the model that a stage has.
        with_experts: whether the second of two numbers in a directory's name counts expert ranks.
        gates: 2 if feed-forward layers are gated, else 1.
    """

    axes: Mapping[str, int]
    with_experts: bool
    gates: int

    def coordinate(self, rank: Rank, chunk: int) -> tuple[int, ...]:
        """Return the coordinate of a chunk of a rank along the axes."""
        return (*_three(rank, with_experts=self.with_experts), chunk)

    def chunk(self, rank: Rank, chunk: int) -> tuple[int, ...]:
        """Return the coordinate without that of the experts."""
        tensor, stage, _ = _three(rank, with_experts=self.with_experts)
        return tensor, stage, chunk

    def pipeline(self, rank: Rank) -> tuple[int, int]:
        """Return the pipeline stage of a rank, and the number of stages."""
        return _three(rank, with_experts=self.with_experts)[1], self.axes["pp"]


def axes_of_numbers(rank: Rank) -> tuple[str, ...]:
    """Return the axes that the numbers in the name of a rank's directory count."""
    args = rank.args
    if len(rank.numbers) == 2 and _size(args, "pp") == 1 and (_size(args, "ep") or 1) > 1:
        return "tp", "ep"
    return tuple(ARGS_OF_AXES)[: len(rank.numbers)]


def geometry_of(ranks: Sequence[Rank], where: str) -> Geometry:
    """Derive the axes from the names of directories, the shapes and the arguments.

    Raises:
        FormatError: they contradict each other.
    """
    args = ranks[0].args
    with_experts = axes_of_numbers(ranks[0]) == ("tp", "ep")
    coordinates = [_three(rank, with_experts=with_experts) for rank in ranks]
    sizes = [max(column) + 1 for column in zip(*coordinates, strict=True)]
    axes = dict(zip(ARGS_OF_AXES, sizes, strict=True))
    for axis, size in axes.items():
        said = _size(args, axis)
        if said is not None and said != size:
            raise FormatError(
                f"{where}: {ARGS_OF_AXES[axis]} was {said}, but there are directories of {size} "
                "ranks"
            )
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) > 1:
        raise FormatError(f"{where}: ranks have different numbers of chunks of the model")
    _check_experts(ranks, axes, where)
    gates = {n for rank in ranks for n in _gates(rank)} or {1}
    if len(gates) > 1:
        raise FormatError(
            f"{where}: some feed-forward layers are gated and some are not, which is not supported"
        )
    return Geometry({**axes, "vp": chunks.pop()}, with_experts, gates.pop())


def _three(rank: Rank, *, with_experts: bool) -> tuple[int, int, int]:
    numbers = rank.numbers
    if with_experts:
        return numbers[0], 0, numbers[1]
    tensor, stage, expert = (*numbers, 0, 0)[:3]
    return tensor, stage, expert


def _size(args: Mapping[str, Any], axis: str) -> int | None:
    found = args.get(ARGS_OF_AXES[axis])
    return found if type(found) is int else None


def _check_experts(ranks: Sequence[Rank], axes: Mapping[str, int], where: str) -> None:
    own = ranks[0].args.get("expert_tensor_parallel_size")
    experts = any(".experts." in name for chunk in ranks[0].chunks for name in chunk)
    if experts and type(own) is int and own != axes["tp"]:
        raise FormatError(
            f"{where}: experts are divided among {own} ranks and the rest among "
            f"{axes['tp']} (expert_tensor_parallel_size), which is not supported"
        )
    version = ranks[0].values.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2:
        raise FormatError(
            f"{where}: checkpoint version {version} orders queries, keys and values differently; "
            "only versions from 2.0 are supported"
        )


def _gates(rank: Rank) -> set[int]:
    """Return how many times larger the first feed-forward layers are than the second expect."""
    found = set()
    for chunk in rank.chunks:
        for name, array in chunk.items():
            for first, second in zip(_FIRST, _SECOND, strict=True):
                other = chunk.get(name.replace(f".{first}.weight", f".{second}.weight"))
                if f".{first}.weight" not in name or other is None:
                    continue
                if len(array.shape) != 2 or len(other.shape) != 2 or not other.shape[1]:
                    raise FormatError(f"{rank.where}: {name} is not a matrix")
                found.add(array.shape[0] // other.shape[1])
    return found


def check_ranks(tree: Tree, files: Files, ranks: Sequence[Rank]) -> None:
    """Check that no rank is missing, no directory was renamed, and all are from one iteration.

    Raises:
        FormatError: a check fails; the message names the files.
    """
    first = ranks[0]
    axes = axes_of_numbers(first)
    said = [first.args.get(ARGS_OF_AXES[axis]) for axis in axes]
    found = [max(column) + 1 for column in zip(*(rank.numbers for rank in ranks), strict=True)]
    sizes = [max(n, m) if type(m) is int else n for n, m in zip(found, said, strict=True)]
    if math.prod(sizes) > MOST_FILES:
        raise FormatError(
            f"{tree}: {' × '.join(map(str, sizes))} ranks exceed the limit of {MOST_FILES} files"
        )
    name = MODEL if MODEL in files.ranks[first.numbers] else OLD_MODEL
    wanted = (path_of(files, numbers, name) for numbers in product(*map(range, sizes)))
    tree.require(wanted, WROTE)
    flat = [rank.numbers for rank in ranks if rank.flat is None and _is_distributed(rank.optimizer)]
    tree.require((path_of(files, numbers, FLAT) for numbers in flat), WROTE)
    _check_order(tree, {rank.numbers: rank for rank in ranks})
    _check_iterations(tree, ranks)


def _is_distributed(optimizer: object) -> bool:
    """Return whether an optimizer has its state in the buffers of another file."""
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    return any(
        isinstance(group, dict) and group.get(PARAMS) is None
        for part in parts
        for group in _groups(part)
    )


def _groups(part: object) -> Iterator[object]:
    inner = part.get("optimizer", part) if isinstance(part, dict) else None
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    yield from groups if isinstance(groups, list) else []


def _check_iterations(tree: Tree, ranks: Sequence[Rank]) -> None:
    """Require that all ranks saved after the same iteration."""
    first = ranks[0]
    for rank in ranks:
        found, wanted = (each.values.get(ITERATION) for each in (rank, first))
        if found != wanted:
            raise FormatError(
                f"{tree}: the directories are from different saves: {first.where} is from "
                f"iteration {wanted!r}, and {rank.where} from iteration {found!r}. Copy all "
                "directories of one save from where the checkpoint is whole, or open another"
            )


def _check_order(tree: Tree, ranks: Mapping[Numbers, Rank]) -> None:
    """Require that the recorded global rank grows with the directory's number along each axis.

    This holds for every order of the axes. Tools that convert checkpoints record the same rank in
    all files, or none; then nothing is checked.
    """
    said = {numbers: rank.args.get("rank") for numbers, rank in ranks.items()}
    if len({*said.values()}) < len(said):
        return
    for numbers, rank in said.items():
        for axis in range(len(numbers)):
            before = (*numbers[:axis], numbers[axis] - 1, *numbers[axis + 1 :])
            other = said.get(before)
            if type(rank) is int and type(other) is int and rank < other:
                raise FormatError(
                    f"{tree}: directories were renamed: {ranks[before].where} was written by rank "
                    f"{other}, and {ranks[numbers].where}, which comes after it, by rank {rank}. "
                    "Give them the names that they had"
                )
