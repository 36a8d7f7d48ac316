"""Finds the files of a DeepSpeed checkpoint by their names, and refuses it if files are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import CheckpointNotFoundError, FileTree, FormatError

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
WEIGHTS_KEY, HYPERPARAMETERS_FILE = "fp32", "optimizer_state.pt"
FILES_WITHOUT_STATE = (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py")
LARGEST_TAG = 4096
MOST_TAGS_SHOWN = 8

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,7})(?:-(?:.*-)?model_(\d{1,7})|-.*)?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d{1,7})_)?expert_(\d{1,7})_mp_rank_(\d{1,7})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_FIRST_MODEL = re.compile(r"mp_rank_0+_model_states\.pt")
_DATA_PARALLEL_PREFIX = "zero_pp_rank_"
_KINDS = {
    "model": _MODEL,
    "optimizer": _OPTIMIZER,
    "experts": _EXPERT,
    "expert_optimizers": _EXPERT_OPTIMIZER,
    "layers": _LAYER,
}
"""The files of each field of `TagFiles`. The numbers in their names are the keys."""
_WHO_WROTE_FILES = "ranks of DeepSpeed wrote"

RankKey: TypeAlias = tuple[int, int]
"""A data-parallel rank and a model-parallel rank.

A model-parallel rank is `stage * tensor_parallel + tensor-parallel rank`.
"""


@dataclass(frozen=True, slots=True)
class TagFiles:
    """The names of the files of one tag. The keys are the ranks that wrote them.

    Attributes:
        folder: the folder of the tag with a final `/`, or "".
        model: model states. The data-parallel rank is 0 if only the first one wrote a file.
        optimizer: optimizer states; empty without ZeRO.
        layers: pipeline layers. The key is (layer, tensor-parallel rank).
        experts: files of experts. The key is (layer, expert, model-parallel rank), where `layer`
            counts only the layers that have experts.
        expert_optimizers: the key is (expert-parallel rank, model-parallel rank).
        unknown: files that DeepSpeed's engine does not write.
        zero_3: whether every data-parallel rank wrote model states, as ZeRO 3 does.
    """

    folder: str
    model: Mapping[RankKey, str]
    optimizer: Mapping[RankKey, str]
    layers: Mapping[tuple[int, int], str]
    experts: Mapping[tuple[int, int, int], str]
    expert_optimizers: Mapping[tuple[int, int], str]
    unknown: tuple[str, ...]
    zero_3: bool

    @property
    def model_parallel(self) -> int:
        """The number of model-parallel ranks."""
        return 1 + max(rank for _, rank in [*self.optimizer, *self.model])

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks; 1 if the file names do not contain it."""
        return 1 + max((rank for rank, _ in [*self.optimizer, *self.model]), default=0)


def has_native_files(tree: FileTree) -> bool:
    """Return whether a directory has files of ranks as DeepSpeed's engine writes them.

    If the tag that `latest` names is missing, a later error should name this tag. So return True in
    this case, if the directory has another tag, or only the files in `FILES_WITHOUT_STATE`.
    """
    folder = _folder_of_latest_tag(tree)
    if folder is None:
        return bool(_list_tags(tree)) or tree.sizes.keys() <= {*FILES_WITHOUT_STATE}
    has_ranks = any(
        name.startswith(folder) and _is_rank_file(name.removeprefix(folder)) for name in tree.sizes
    )
    return has_ranks and not _has_parameter_files(tree, folder)


def has_universal_files(tree: FileTree) -> bool:
    """Return whether a directory has the parameter files of a universal checkpoint."""
    folder = _folder_of_latest_tag(tree, universal=True)
    return folder is not None and _has_parameter_files(tree, folder)


def _folder_of_latest_tag(tree: FileTree, *, universal: bool = False) -> str | None:
    """Return the folder of the latest tag with a final `/`.

    The folder is "" if the tree itself is the folder of a tag, and None if the tag has no files.
    """
    tag = _read_latest_tag(tree, universal=universal)
    if tag is None:
        return ""
    folder = f"{tag.strip('/')}/"
    return folder if any(name.startswith(folder) for name in tree.sizes) else None


def _read_latest_tag(tree: FileTree, *, universal: bool) -> str | None:
    name = LATEST_UNIVERSAL if universal else LATEST
    if tree.sizes.get(name, LARGEST_TAG + 1) > LARGEST_TAG:
        return None
    return tree.read(name, limit=LARGEST_TAG).decode(errors="replace").strip()


def _is_rank_file(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))


def _list_tags(tree: FileTree) -> list[str]:
    """Return the folders that have files of ranks."""
    split_names = [name.rpartition("/") for name in tree.sizes]
    return sorted({folder for folder, _, name in split_names if folder and _is_rank_file(name)})


def _has_parameter_files(tree: FileTree, folder: str) -> bool:
    endings = f"/{WEIGHTS_KEY}.pt", f"/{HYPERPARAMETERS_FILE}"
    return any(name.startswith(f"{folder}zero/") and name.endswith(endings) for name in tree.sizes)


def find_files(tree: FileTree, *, universal: bool = False) -> TagFiles:
    """Find the files of the latest tag, and require those of all ranks up to the last one found.

    Raises:
        CheckpointNotFoundError: the path is a single file of a checkpoint of several files.
        FormatError: the tag or files of ranks are missing.
    """
    folder = _require_folder(tree, universal=universal)
    found: dict[str, dict[Any, str]] = {kind: {} for kind in _KINDS}
    unknown = []
    for path in (path for path in tree.sizes if path.startswith(folder)):
        name = path.removeprefix(folder)
        matches = ((kind, pattern.fullmatch(name)) for kind, pattern in _KINDS.items())
        kind, match = next(((k, match) for k, match in matches if match), ("", None))
        if match is None:
            unknown.append(name)
            continue
        key = tuple(int(number or 0) for number in match.groups())
        # A universal checkpoint can have files zero_pp_rank_… and mp_rank_… of the same rank.
        # The files mp_rank_… contain more.
        if kind != "model" or key not in found[kind] or not match[1]:
            found[kind][key] = path
    if not found["model"]:
        raise FormatError(
            f"{tree}: all files of model states (…_model_states.pt) are missing. Copy them from "
            "a complete copy of the checkpoint, or open another checkpoint"
        )
    zero_3 = any(_DATA_PARALLEL_PREFIX in name for name in found["model"].values())
    files = TagFiles(folder=folder, **found, unknown=tuple(unknown), zero_3=zero_3)
    require_rank_files(
        tree,
        files,
        data_parallel=files.data_parallel,
        model_parallel=files.model_parallel,
        with_zero=bool(files.optimizer),
    )
    return files


def _require_folder(tree: FileTree, *, universal: bool) -> str:
    if tree.single_file is not None and not _FIRST_MODEL.fullmatch(tree.single_file):
        raise _single_file_error(tree)
    folder = _folder_of_latest_tag(tree, universal=universal)
    if folder is not None:
        return folder
    latest = LATEST_UNIVERSAL if universal else LATEST
    tag = _read_latest_tag(tree, universal=universal)
    existing = ", ".join(_list_tags(tree)[:MOST_TAGS_SHOWN])
    raise FormatError(
        f"{tree}: the tag {tag!r}, which {latest!r} names, is missing: copy it from a complete "
        "copy of the checkpoint"
        + (f", or open one of the tags that exist: {existing}" if existing else "")
    )


def _single_file_error(tree: FileTree) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{tree} is only one of the files that the ranks wrote: open {tree.parent}"
    )


def require_rank_files(
    tree: FileTree, files: TagFiles, *, data_parallel: int, model_parallel: int, with_zero: bool
) -> None:
    """Require the files of all ranks.

    Args:
        data_parallel: the number of data-parallel ranks.
        model_parallel: the number of model-parallel ranks.
        with_zero: whether each rank wrote a file of optimizer states, as it does under ZeRO.

    Raises:
        CheckpointNotFoundError: the path is a single file of a checkpoint of several files.
        FormatError: files are missing; the message names them.
    """
    bf16 = "bf16_" if any("bf16_" in name for name in files.optimizer.values()) else ""

    def expected() -> Iterator[str]:
        for data_rank in range(data_parallel):
            for rank in range(model_parallel):
                if files.zero_3:
                    yield f"{_DATA_PARALLEL_PREFIX}{data_rank}_mp_rank_{rank:02d}_model_states.pt"
                elif not data_rank:
                    yield f"mp_rank_{rank:02d}_model_states.pt"
                if with_zero:
                    zero = f"{bf16}{_DATA_PARALLEL_PREFIX}{data_rank}_mp_rank_{rank:02d}"
                    yield f"{zero}_optim_states.pt"

    if tree.single_file is not None and [*islice(expected(), 2)] != [tree.single_file]:
        raise _single_file_error(tree)
    tree.require((f"{files.folder}{name}" for name in expected()), _WHO_WROTE_FILES)


def require_layers_and_experts(
    tree: FileTree, files: TagFiles, layers: Iterable[int], experts: Sequence[int]
) -> None:
    """Require the files of pipeline layers and of experts.

    Args:
        layers: the numbers of the layers that have parameters.
        experts: the number of experts in each layer that has any.

    Raises:
        FormatError: files are missing; the message names them.
    """
    # One file name for each tensor-parallel rank, as a template: only its layer number changes.
    templates = {
        rank: name.removeprefix(files.folder)
        for (_, rank), name in sorted(files.layers.items(), reverse=True)
    } or {0: "layer_0-model_states.pt"}
    names = (
        re.sub(r"^layer_\d+", f"layer_{layer:02d}", template)
        for layer in layers
        for template in templates.values()
    )
    names_of_experts = (
        f"layer_{layer}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt"
        for layer, count in enumerate(experts)
        for expert in range(count)
        for rank in range(files.model_parallel)
    )
    required = (f"{files.folder}{name}" for name in chain(names, names_of_experts))
    tree.require(required, _WHO_WROTE_FILES)
