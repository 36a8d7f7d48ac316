"""Which files a checkpoint of DeepSpeed consists of, by their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import FormatError
from shardwise.formats.tree import Tree

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
LARGEST_TAG = 4096

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,7})(?:-(.*))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d{1,7})_)?expert_(\d{1,7})_mp_rank_(\d{1,7})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_MODEL_SLICE = "zero_pp_rank_"
_TENSOR_RANK = re.compile(r"(?:^|-)model_(\d{1,7})$")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one tag, by the ranks that wrote them.

    Attributes:
        folder: with `/` at its end; or "".
        model: by data-parallel rank (0, if only the first wrote) and model-parallel rank.
        optimizer: by data-parallel and model-parallel rank; none without ZeRO.
        layers: of a pipeline, by layer and tensor-parallel rank.
        experts: by the number of the layer among those with experts, expert, model-parallel rank.
        expert_optimizers: by expert-parallel and model-parallel rank.
        others: that are none of these.
        sliced: ZeRO 3, where each rank writes its model states.
    """

    folder: str
    model: Mapping[tuple[int, int], str]
    optimizer: Mapping[tuple[int, int], str]
    layers: Mapping[tuple[int, int], str]
    experts: Mapping[tuple[int, int, int], str]
    expert_optimizers: Mapping[tuple[int, int], str]
    others: tuple[str, ...]
    sliced: bool

    @property
    def model_parallel(self) -> int:
        """How many model-parallel ranks there are."""
        return 1 + max(rank for _, rank in self.model)

    @property
    def data_parallel(self) -> int:
        """How many data-parallel ranks there are; 1 if the files do not say."""
        return 1 + max((rank for rank, _ in [*self.optimizer, *self.model]), default=0)


def has_native_files(tree: Tree) -> bool:
    """Whether there is a file of model states where a checkpoint of the engine would have it."""
    folder = folder_of(tree)
    return folder is not None and _has_model(tree, folder) and not _has_atoms(tree, folder)


def has_universal_files(tree: Tree) -> bool:
    """Whether there are atoms where a universal checkpoint would have them."""
    folder = folder_of(tree, universal=True)
    return folder is not None and _has_model(tree, folder) and _has_atoms(tree, folder)


def folder_of(tree: Tree, tag: str | None = None, *, universal: bool = False) -> str | None:
    """The folder of a tag, or of the one that is latest, with `/` at its end; "" if the place is
    that folder itself. None if there is none.
    """
    latest = LATEST_UNIVERSAL if universal else LATEST
    if tag is None and latest in tree.sizes and tree.sizes[latest] <= LARGEST_TAG:
        tag = tree.read(latest, limit=LARGEST_TAG).decode(errors="replace").strip()
    if tag is None:
        return ""
    folder = f"{tag.strip('/')}/"
    return folder if any(name.startswith(folder) for name in tree.sizes) else None


def _has_model(tree: Tree, folder: str) -> bool:
    return any(
        name.startswith(folder) and _MODEL.fullmatch(name.removeprefix(folder))
        for name in tree.sizes
    )


def _has_atoms(tree: Tree, folder: str) -> bool:
    return any(name.startswith(f"{folder}zero/") for name in tree.sizes)


def find_files(tree: Tree, tag: str | None, *, universal: bool = False) -> Files:
    """The files of a tag.

    Raises:
        FormatError: there are none, or some are missing among those of ranks.
    """
    folder = folder_of(tree, tag, universal=universal)
    if folder is None:
        raise FormatError(f"{tree}: the tag {tag or 'that latest names'!r} is not there")
    model: dict[tuple[int, int], str] = {}
    optimizer: dict[tuple[int, int], str] = {}
    layers: dict[tuple[int, int], str] = {}
    experts: dict[tuple[int, int, int], str] = {}
    expert_optimizers: dict[tuple[int, int], str] = {}
    others = []
    for path in tree.sizes:
        name = path.removeprefix(folder)
        if not path.startswith(folder):
            continue
        if found := _MODEL.fullmatch(name):
            key = int(found[1] or 0), int(found[2])
            # A universal checkpoint for all stages of ZeRO has both; that of ZeRO 3 holds less.
            if key not in model or not found[1]:
                model[key] = path
        elif found := _OPTIMIZER.fullmatch(name):
            optimizer[int(found[1]), int(found[2])] = path
        elif found := _EXPERT.fullmatch(name):
            experts[int(found[1] or 0), int(found[2]), int(found[3])] = path
        elif found := _EXPERT_OPTIMIZER.fullmatch(name):
            expert_optimizers[int(found[1]), int(found[2])] = path
        elif found := _LAYER.fullmatch(name):
            rank = _TENSOR_RANK.search(found[2] or "")
            layers[int(found[1]), int(rank[1]) if rank else 0] = path
        else:
            others.append(name)
    if not model:
        raise FormatError(f"{tree}: there is no file of model states (…_model_states.pt)")
    sliced = any(_MODEL_SLICE in name for name in model.values())
    files = Files(
        folder, model, optimizer, layers, experts, expert_optimizers, tuple(others), sliced
    )
    _check_complete(tree, files)
    return files


def _check_complete(tree: Tree, files: Files) -> None:
    """Whether all ranks up to the last are there."""
    parallel = range(files.model_parallel)
    for kind, found in (("model", files.model), ("optim", files.optimizer)):
        if not found or (kind == "model" and not files.sliced):
            ranks = range(1 if kind == "model" else 0)
        else:
            ranks = range(files.data_parallel)
        if len(found) != len(ranks) * len(parallel):
            missing = [(d, m) for d in ranks for m in parallel if (d, m) not in found]
            if not missing:
                raise FormatError(f"{tree}: there are more files of {kind} states than ranks")
            raise FormatError(
                f"{tree}: {len(missing)} files of {kind} states are missing, as that of "
                f"data-parallel rank {missing[0][0]} and model-parallel rank {missing[0][1]}"
            )
