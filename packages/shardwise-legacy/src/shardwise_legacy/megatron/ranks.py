"""Finds and reads the files of all ranks, and derives the axes along which ranks are parallel."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import (
    CheckpointNotFoundError,
    FileTree,
    FormatError,
    PickledInstance,
    StoredArray,
    UnknownObject,
)

LATEST_FILE = "latest_checkpointed_iteration.txt"
LARGEST_LATEST_FILE = 100
MODEL_FILE, BUFFERS_FILE = "model_optim_rng.pt", "distrib_optim.pt"
OLD_MODEL_FILE, OLD_OPTIMIZER_FILE = "model_rng.pt", "optim.pt"
FILE_NAMES = (MODEL_FILE, BUFFERS_FILE, OLD_MODEL_FILE, OLD_OPTIMIZER_FILE)
NEEDED_BY = "ranks of Megatron-LM wrote"
ARGS, OPTIMIZER, RNG, ITERATION = "args", "optimizer", "rng_state", "iteration"
STATE, GROUPS, PARAMS = "state", "param_groups", "params"
UNSUPPORTED = (
    "the file is damaged, or an unsupported version of Megatron-LM wrote it; copy the file again, "
    "or leave out the optimizer with skip="
)
_MASTERS_KEYS = ("fp32_from_fp16_params", "fp32_from_fp16")
SIZE_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
"""The argument of Megatron-LM that has the size of each axis."""

OUTPUT, EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"
UNTIED = "untie_embeddings_and_output_weights"
_PATH = re.compile(
    r"(?:(iter_\d{1,18}|release)/)?mp_rank_(\d{1,6})(?:_(\d{1,6}))?(?:_(\d{1,6}))?/([a-z_]+\.pt)"
)
_CHUNK = re.compile(r"model(\d{0,4})")
_FIRST_LAYERS = ("linear_fc1", "dense_h_to_4h")
_SECOND_LAYERS = ("linear_fc2", "dense_4h_to_h")
_BUFFER_SUFFIXES = ("_extra_state", "expert_bias", "inv_freq", "local_tokens_per_expert")
"""Endings of the names of a module's buffers, which are not parameters."""
_MOST_ITERATIONS_SHOWN = 5

DirectoryNumbers: TypeAlias = tuple[int, ...]
"""The numbers in the name of a rank's directory: tensor-parallel, pipeline and expert rank."""
Arrays: TypeAlias = Mapping[str, StoredArray]
SavedParamGroup: TypeAlias = Mapping[str, Any]
"""A param group as it was saved: hyperparameters, and numbers of parameters if it has them."""


@dataclass(frozen=True, slots=True)
class IterationFiles:
    """The files of one iteration.

    Attributes:
        folder: the folder of the iteration with a final `/`, or "" if it is the place itself.
        ranks: for the numbers of each rank's directory, the paths of its files by file name.
        others: files that no rank wrote.
    """

    folder: str
    ranks: Mapping[DirectoryNumbers, Mapping[str, str]]
    others: tuple[str, ...]

    def path_of(self, numbers: DirectoryNumbers, name: str) -> str:
        """Return the path of a rank's file, whether it exists or not."""
        tensor, *others = numbers
        directory = "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])
        return f"{self.folder}{directory}/{name}"


def has_rank_files(tree: FileTree) -> bool:
    """Return whether a place has a rank's file where Megatron-LM would have written it.

    The result is also True for the directory of one rank, and for a place that has only the file
    `LATEST_FILE`.
    """
    if tree.single_file is not None:
        return False
    return tree.sizes.keys() == {LATEST_FILE} or any(
        name in (MODEL_FILE, BUFFERS_FILE, OLD_MODEL_FILE)
        or (match is not None and match[5] in FILE_NAMES)
        for name, match in ((name, _PATH.fullmatch(name)) for name in tree.sizes)
    )


def find_files(tree: FileTree) -> IterationFiles:
    """Find the files of the latest iteration, or of the only one.

    Raises:
        FormatError: the iteration is missing, or there are several and no file names the latest.
    """
    matches = {name: match for name in tree.sizes if (match := _PATH.fullmatch(name)) is not None}
    iteration = _choose_iteration(tree, sorted({match[1] or "" for match in matches.values()}))
    ranks: dict[DirectoryNumbers, dict[str, str]] = {}
    for name, match in matches.items():
        if (match[1] or "") == iteration:
            numbers = tuple(int(number) for number in match.groups()[1:4] if number is not None)
            if match[5] in ranks.setdefault(numbers, {}):
                raise FormatError(
                    f"{tree}: {name} and {ranks[numbers][match[5]]} are of the same rank: remove "
                    "the directory that Megatron-LM did not write"
                )
            ranks[numbers][match[5]] = name
    if len({len(numbers) for numbers in ranks}) > 1:
        examples = {len(numbers): min(files.values()) for numbers, files in ranks.items()}
        raise FormatError(
            f"{tree}: the names of the ranks' directories have different counts of numbers: "
            f"{' and '.join(examples.values())} are from different saves: copy all files of one "
            "save"
        )
    folder = f"{iteration}/" if iteration else ""
    others = [name for name in tree.sizes if name.startswith(folder) and name not in matches]
    return IterationFiles(
        folder, dict(sorted(ranks.items())), tuple(name for name in others if name != LATEST_FILE)
    )


def _choose_iteration(tree: FileTree, iterations: list[str]) -> str:
    if LATEST_FILE in tree.sizes:
        text = tree.read(LATEST_FILE, limit=LARGEST_LATEST_FILE).decode(errors="replace").strip()
        iteration = f"iter_{int(text):07d}" if text.isascii() and text.isdigit() else text
        if iteration not in iterations:
            existing = ", ".join(iterations[:_MOST_ITERATIONS_SHOWN])
            raise FormatError(
                f"{tree}: {LATEST_FILE} says {text!r}, and {iteration[:40]} is missing: copy it "
                "from a complete copy of the checkpoint"
                + (f", or open one of the iterations that exist: {existing}" if existing else "")
            )
        return iteration
    if len(iterations) > 1:
        raise FormatError(
            f"{tree}: {LATEST_FILE} is missing, so that the latest of "
            f"{', '.join(iterations[:_MOST_ITERATIONS_SHOWN])} is unknown: open one of them"
        )
    return iterations[0] if iterations else ""


def require_files(tree: FileTree, files: IterationFiles) -> None:
    """Require that every rank has the files that other ranks have.

    Raises:
        CheckpointNotFoundError: the place is the directory of one rank.
        FormatError: files are missing; the message names them.
    """
    if not files.ranks:
        raise CheckpointNotFoundError(
            f"{tree} is the directory of one rank: open {tree.parent}, which has all of them"
        )
    found = {name for paths in files.ranks.values() for name in paths}
    is_old = OLD_MODEL_FILE in found and MODEL_FILE not in found
    names = (
        OLD_MODEL_FILE if is_old else MODEL_FILE,
        *(name for name in (BUFFERS_FILE, OLD_OPTIMIZER_FILE) if name in found),
    )
    tree.require((files.path_of(rank, name) for rank in files.ranks for name in names), NEEDED_BY)


@dataclass(frozen=True, slots=True)
class OptimizerPart:
    """A part of an optimizer; a model with experts has several.

    Attributes:
        state: the state by number of the parameter.
        groups: the param groups.
        masters: the master weights of each param group.
        values: other values.
    """

    state: Mapping[Any, Any]
    groups: Sequence[SavedParamGroup]
    masters: Sequence[Any]
    values: Mapping[str, Any]

    def state_at(self, index: object) -> Mapping[Any, Any]:
        """Return the state of the parameter with a number; it is empty if there is none."""
        state = self.state.get(index) if type(index) is int else None
        return state if isinstance(state, dict) else {}


@dataclass(frozen=True, slots=True)
class Rank:
    """The contents of one model-parallel rank's files.

    Attributes:
        numbers: the numbers in the name of its directory.
        position: the tensor-parallel rank, the pipeline stage, and the expert-parallel rank.
        path: the path of its directory.
        chunks: the arrays by name of each chunk of the model; there is one chunk unless pipeline
            stages are interleaved.
        optimizer: the parts of the optimizer; none if it was not saved.
        buffers: the buffers of the distributed optimizer as they were saved, or None.
        args: the program's arguments by name.
        values: everything else.
        unread: names of values in the chunks that are not arrays.
    """

    numbers: DirectoryNumbers
    position: tuple[int, int, int]
    path: str
    chunks: Sequence[Arrays]
    optimizer: Sequence[OptimizerPart]
    buffers: Any
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    unread: Sequence[str]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a rank.

    Attributes:
        chunk: the index of its chunk of the model.
        name: its name in the chunk.
        array: its weight.
    """

    chunk: int
    name: str
    array: StoredArray

    @property
    def belongs_to_expert(self) -> bool:
        """Whether it belongs to an expert, which only some data-parallel ranks have."""
        return ".experts." in self.name

    @property
    def decays(self) -> bool:
        """Whether Megatron-LM applies weight decay to it: to all but biases and norms."""
        return len(self.array.shape) != 1 and not self.name.endswith(".bias")

    @property
    def is_embedding(self) -> bool:
        """Whether it is an embedding or output layer, which can have a separate learning rate."""
        return self.name.endswith(("word_embeddings.weight", OUTPUT))


def parameters_of(rank: Rank) -> list[Parameter]:
    """Return the parameters of a rank, in the module's order."""
    return [
        Parameter(chunk, name, array)
        for chunk, arrays in enumerate(rank.chunks)
        for name, array in arrays.items()
        if not name.endswith(_BUFFER_SUFFIXES)
    ]


def read_ranks(tree: FileTree, files: IterationFiles) -> list[Rank]:
    """Read the files of all ranks, in parallel; no array is read.

    Raises:
        FormatError: a file is malformed.
    """
    names = [path for paths in files.ranks.values() for path in paths.values()]
    values = tree.load_each(names, skip_unknown=True)
    return [
        _parse_rank(tree, numbers, {name: (path, values[path]) for name, path in paths.items()})
        for numbers, paths in files.ranks.items()
    ]


def _parse_rank(
    tree: FileTree, numbers: DirectoryNumbers, contents: Mapping[str, tuple[str, Any]]
) -> Rank:
    """Return the contents of a rank's files, given their paths and values by name."""
    states: dict[str, Mapping[Any, Any]] = {}
    buffers = None
    directory = ""
    for name, (path, value) in contents.items():
        if name == BUFFERS_FILE:
            buffers = value
        else:
            states[name] = _require_dict(value, tree.label(path))
            if name in (MODEL_FILE, OLD_MODEL_FILE):
                directory = tree.label(path.rpartition("/")[0])
    state: dict[Any, Any] = {}
    for name in (OLD_OPTIMIZER_FILE, OLD_MODEL_FILE, MODEL_FILE):
        state |= states.get(name, {})
    chunks = _find_chunks(state, directory)
    leaves = [dict(_flatten(chunk, "")) for chunk in chunks.values()]
    arrays = [{n: v for n, v in chunk.items() if isinstance(v, StoredArray)} for chunk in leaves]
    unread = [
        f"{n}, an object of {v.name}" if isinstance(v, UnknownObject) else n
        for chunk in leaves
        for n, v in chunk.items()
        if not isinstance(v, StoredArray)
    ]
    args = state.get(ARGS)
    args = args.fields if isinstance(args, PickledInstance) else args
    fields = args if isinstance(args, dict) else {}
    values = {
        str(key): value
        for key, value in state.items()
        if key not in (ARGS, OPTIMIZER, *chunks) or isinstance(value, UnknownObject)
    }
    coordinate = dict(zip(directory_axes(numbers, fields), numbers, strict=True))
    position = coordinate["tp"], coordinate.get("pp", 0), coordinate.get("ep", 0)
    saved = state.get(OPTIMIZER)
    saved_parts = saved if isinstance(saved, list) else [] if saved is None else [saved]
    parts = [_parse_optimizer_part(part, directory) for part in saved_parts]
    return Rank(numbers, position, directory, arrays, parts, buffers, fields, values, unread)


def _parse_optimizer_part(saved: Any, path: str) -> OptimizerPart:
    outer = saved if isinstance(saved, dict) else {}
    inner = outer.get(OPTIMIZER, outer)
    groups = inner.get(GROUPS) if isinstance(inner, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise FormatError(f"{path}: its optimizer has no valid list {GROUPS}: {UNSUPPORTED}")
    state = inner.get(STATE, {})
    masters: Any = next((outer[key] for key in _MASTERS_KEYS if key in outer), [])
    if not isinstance(state, dict) or not isinstance(masters, list):
        raise FormatError(
            f"{path}: its optimizer is malformed: the state is {type(state).__name__}, the master "
            f"weights are {type(masters).__name__}: {UNSUPPORTED}"
        )
    if not all(isinstance(group, list) for group in masters):
        raise FormatError(
            f"{path}: the master weights of its optimizer are not in groups: {UNSUPPORTED}"
        )
    known_keys = {OPTIMIZER, GROUPS, STATE, *_MASTERS_KEYS}
    values = {str(key): value for key, value in outer.items() if key not in known_keys}
    return OptimizerPart(state, groups, masters, values)


def _find_chunks(state: Mapping[Any, Any], directory: str) -> dict[str, Mapping[Any, Any]]:
    keys: dict[int, str] = {}
    for key in state:
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            keys[int(match[1] or 0)] = key
    if sorted(keys) != list(range(len(keys))) or not keys:
        raise FormatError(
            f"{directory}: a chunk of the model is missing: expected the key 'model', or 'model0', "
            f"'model1', …; found {sorted(keys.values())}: copy the file again from an intact source"
        )
    chunks = {keys[number]: state[keys[number]] for number in sorted(keys)}
    return {key: _require_dict(chunk, f"{directory}: {key}") for key, chunk in chunks.items()}


def _require_dict(value: object, label: str) -> Mapping[Any, Any]:
    if isinstance(value, UnknownObject):
        raise FormatError(f"{label}: {value.reason}")
    if not isinstance(value, dict):
        raise FormatError(
            f"{label}: expected a dict, found {type(value).__name__}: copy the file again from an "
            "intact source"
        )
    return value


def _flatten(value: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by dotted names; Megatron's old models are nested."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            yield from _flatten(item, f"{name}.")
        else:
            yield name, item


def directory_axes(numbers: DirectoryNumbers, args: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the axes that the numbers in the names of directories count."""
    stages, experts = (args.get(SIZE_ARGS[axis]) for axis in ("pp", "ep"))
    if len(numbers) == 2 and stages == 1 and type(experts) is int and experts > 1:
        return "tp", "ep"
    return tuple(SIZE_ARGS)[: len(numbers)]


def find_sizes(tree: FileTree, files: IterationFiles, ranks: Sequence[Rank]) -> dict[str, int]:
    """Return the sizes of the axes tp, pp and ep, and require the directories of all ranks.

    Raises:
        FormatError: directories are missing, or contradict the arguments.
    """
    first = ranks[0]
    axes = directory_axes(first.numbers, first.args)
    sizes = {}
    for i, (axis, key) in enumerate(SIZE_ARGS.items()):
        found, recorded = max(rank.position[i] for rank in ranks) + 1, first.args.get(key)
        sizes[axis] = recorded if type(recorded) is int else found
        if sizes[axis] < found or (axis not in axes and sizes[axis] > found):
            raise FormatError(
                f"{tree}: {key} was {recorded}, but there are directories of {found} "
                "ranks: copy all directories from a complete copy of the checkpoint"
            )
    model_file = MODEL_FILE if MODEL_FILE in files.ranks[first.numbers] else OLD_MODEL_FILE
    all_numbers = _all_numbers([sizes[axis] for axis in axes])
    tree.require((files.path_of(numbers, model_file) for numbers in all_numbers), NEEDED_BY)
    return sizes


def _all_numbers(sizes: Sequence[int]) -> Iterator[DirectoryNumbers]:
    """Yield the numbers of all directories, one after the other: there may be far too many."""
    for first in range(sizes[0]):
        if len(sizes) == 1:
            yield (first,)
        else:
            yield from ((first, *others) for others in _all_numbers(sizes[1:]))


def count_chunks_and_gates(ranks: Sequence[Rank], path: str) -> tuple[int, int]:
    """Return the number of chunks of the model on a stage, and 2 if it has gated layers, else 1.

    Raises:
        FormatError: ranks or layers differ.
    """
    path_by_count = {len(rank.chunks): rank.path for rank in ranks}
    if len(path_by_count) > 1:
        examples = " and ".join(f"{count} in {example}" for count, example in path_by_count.items())
        raise FormatError(
            f"{path}: ranks have different numbers of chunks of the model ({examples}): copy all "
            "files of one save"
        )
    gates = {count for rank in ranks for count in _count_gates(rank)} or {1}
    if len(gates) > 1:
        raise FormatError(
            f"{path}: some feed-forward layers are gated and some are not, which is not supported: "
            "describe the model by a specification (spec=)"
        )
    return len(ranks[0].chunks), gates.pop()


def _count_gates(rank: Rank) -> set[int]:
    """Return each ratio of the rows of a first feed-forward layer to the columns of its second."""
    counts = set()
    for chunk in rank.chunks:
        for name, array in chunk.items():
            for first, second in zip(_FIRST_LAYERS, _SECOND_LAYERS, strict=True):
                other = chunk.get(name.replace(f".{first}.weight", f".{second}.weight"))
                if f".{first}.weight" not in name or other is None:
                    continue
                if len(array.shape) != 2 or len(other.shape) != 2 or not other.shape[1]:
                    raise FormatError(
                        f"{rank.path}: {name}: expected matrices, found the shapes "
                        f"{list(array.shape)} and {list(other.shape)}: the file is damaged: copy "
                        "it again from an intact source"
                    )
                counts.add(array.shape[0] // other.shape[1])
    return counts
