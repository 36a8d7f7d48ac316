"""Finds the files of a DeepSpeed checkpoint by their names, and requires that none is missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.tree import MOST_FILES, Tree

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
WEIGHTS, SETTINGS = "fp32", "optimizer_state.pt"
NOT_STATE = (LATEST, LATEST_UNIVERSAL, "zero_to_fp32.py", "zero_to_torch.py")
LARGEST_TAG = 4096
MOST_TAGS = 8

_MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,7})_)?mp_rank_(\d{1,7})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,7})(?:-(.*))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(\d{1,7})_)?expert_(\d{1,7})_mp_rank_(\d{1,7})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_(\d{1,7})_mp_rank_(\d{1,7})_optim_states\.pt")
_FIRST = re.compile(r"mp_rank_0+_model_states\.pt")
_MODEL_SLICE = "zero_pp_rank_"
_TENSOR_RANK = re.compile(r"(?:^|-)model_(\d{1,7})$")


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one tag, by the ranks that wrote them.

    Attributes:
        folder: the folder of the tag with a final `/`, or "".
        model: by data-parallel rank (0, if only the first wrote) and model-parallel rank.
        optimizer: by data-parallel and model-parallel rank; empty without ZeRO.
        layers: pipeline layers, by layer and tensor-parallel rank.
        experts: by the number of the layer among those with experts, expert, model-parallel rank.
        expert_optimizers: by expert-parallel and model-parallel rank.
        others: files that DeepSpeed's engine does not write.
        sliced: whether every rank wrote model states, as under ZeRO 3.
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
        """The number of model-parallel ranks."""
        return 1 + max(rank for _, rank in [*self.optimizer, *self.model])

    @property
    def data_parallel(self) -> int:
        """The number of data-parallel ranks; 1 if the file names do not say it."""
        return 1 + max((rank for rank, _ in [*self.optimizer, *self.model]), default=0)


def has_native_files(tree: Tree) -> bool:
    """Return whether a place has files of ranks as DeepSpeed's engine writes them.

    Also true if `latest` names a missing tag, and there are other tags or no other files.
    """
    folder = folder_of(tree)
    if folder is None:
        return bool(_tags(tree)) or tree.sizes.keys() <= {*NOT_STATE}
    return _has_ranks(tree, folder) and not _has_atoms(tree, folder)


def has_universal_files(tree: Tree) -> bool:
    """Return whether a place has the parameter files of a universal checkpoint."""
    folder = folder_of(tree, universal=True)
    return folder is not None and _has_atoms(tree, folder)


def folder_of(tree: Tree, tag: str | None = None, *, universal: bool = False) -> str | None:
    """Return the folder of a tag (by default the latest one) with a final `/`.

    It is "" if the place is the folder of a tag itself, and None if the tag has no files.
    """
    tag = _latest(tree, universal=universal) if tag is None else tag
    if tag is None:
        return ""
    folder = f"{tag.strip('/')}/"
    return folder if any(name.startswith(folder) for name in tree.sizes) else None


def _latest(tree: Tree, *, universal: bool) -> str | None:
    name = LATEST_UNIVERSAL if universal else LATEST
    if tree.sizes.get(name, LARGEST_TAG + 1) > LARGEST_TAG:
        return None
    return tree.read(name, limit=LARGEST_TAG).decode(errors="replace").strip()


def _has_ranks(tree: Tree, folder: str) -> bool:
    return any(
        name.startswith(folder) and _is_of_rank(name.removeprefix(folder)) for name in tree.sizes
    )


def _is_of_rank(name: str) -> bool:
    return bool(_MODEL.fullmatch(name) or _OPTIMIZER.fullmatch(name))


def _tags(tree: Tree) -> list[str]:
    """Return the folders that have files of ranks."""
    parts = [name.rpartition("/") for name in tree.sizes]
    return sorted({folder for folder, _, name in parts if folder and _is_of_rank(name)})


def _has_atoms(tree: Tree, folder: str) -> bool:
    return any(
        name.startswith(f"{folder}zero/") and name.endswith((f"/{WEIGHTS}.pt", f"/{SETTINGS}"))
        for name in tree.sizes
    )


def find_files(tree: Tree, tag: str | None, *, universal: bool = False) -> Files:
    """Find the files of a tag, and require those of all ranks up to the last.

    Raises:
        CheckpointNotFoundError: the place is one of several files.
        FormatError: the tag or files of ranks are missing.
    """
    folder = _existing_folder(tree, tag, universal=universal)
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
            # A universal checkpoint can have both kinds of files; those of ZeRO 3 hold less.
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
        raise FormatError(
            f"{tree}: all files of model states (…_model_states.pt) are missing. Copy them from "
            "where the checkpoint is whole, or open another"
        )
    sliced = any(_MODEL_SLICE in name for name in model.values())
    files = Files(
        folder, model, optimizer, layers, experts, expert_optimizers, tuple(others), sliced
    )
    require_ranks(
        tree,
        files,
        data_parallel=files.data_parallel,
        model_parallel=files.model_parallel,
        divided=bool(optimizer),
    )
    return files


def _existing_folder(tree: Tree, tag: str | None, *, universal: bool) -> str:
    if tree.only is not None and not _FIRST.fullmatch(tree.only):
        raise _one_of_several(tree)
    folder = folder_of(tree, tag, universal=universal)
    if folder is not None:
        return folder
    said = repr(tag)
    if tag is None:
        latest = LATEST_UNIVERSAL if universal else LATEST
        said = f"{_latest(tree, universal=universal)!r}, which {latest!r} names,"
    there = ", ".join(_tags(tree)[:MOST_TAGS])
    raise FormatError(
        f"{tree}: the tag {said} is missing: copy it from where the checkpoint is whole"
        + (f", or open one of the tags that exist: {there}" if there else "")
    )


def _one_of_several(tree: Tree) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(
        f"{tree} is only one of the files that the ranks wrote: open {tree.path.parent}"
    )


def require_ranks(
    tree: Tree, files: Files, *, data_parallel: int, model_parallel: int, divided: bool
) -> None:
    """Require the files of so many ranks.

    Args:
        divided: ZeRO divided the optimizer, so that each rank wrote a file of its state.

    Raises:
        FormatError: files are missing; the message names them.
    """
    if data_parallel * model_parallel > MOST_FILES:
        raise FormatError(
            f"{tree}: {data_parallel} × {model_parallel} ranks exceed the limit of {MOST_FILES} "
            "files"
        )
    parallel = range(model_parallel)
    ranks = [(rank, column) for rank in range(data_parallel) for column in parallel]
    if files.sliced:
        names = [f"{_MODEL_SLICE}{d}_mp_rank_{m:02d}_model_states.pt" for d, m in ranks]
    else:
        names = [f"mp_rank_{m:02d}_model_states.pt" for m in parallel]
    if divided:
        half = any("bf16_" in name for name in files.optimizer.values())
        start = f"{'bf16_' if half else ''}{_MODEL_SLICE}"
        names += [f"{start}{d}_mp_rank_{m:02d}_optim_states.pt" for d, m in ranks]
    if tree.only is not None and names != [tree.only]:
        raise _one_of_several(tree)
    tree.require([f"{files.folder}{name}" for name in names], "ranks of DeepSpeed wrote")


def require_modules(
    tree: Tree, files: Files, layers: Iterable[int], experts: Sequence[int]
) -> None:
    """Require the files of pipeline layers and of experts.

    Args:
        layers: the numbers of layers that have parameters.
        experts: the number of experts in each layer that has any.

    Raises:
        FormatError: files are missing; the message names them.
    """
    known = {(rank, name) for (_, rank), name in sorted(files.layers.items(), reverse=True)}
    shapes = {rank: name.removeprefix(files.folder) for rank, name in known}
    names = [
        re.sub(r"^layer_\d+", f"layer_{layer:02d}", name)
        for layer in layers
        for name in (shapes or {0: "layer_0-model_states.pt"}).values()
    ]
    if sum(experts) > MOST_FILES:
        raise FormatError(f"{tree}: {sum(experts)} experts exceed the limit of {MOST_FILES} files")
    names += [
        f"layer_{layer}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt"
        for layer, count in enumerate(experts)
        for expert in range(count)
        for rank in range(files.model_parallel)
    ]
    tree.require([f"{files.folder}{name}" for name in names], "ranks of DeepSpeed wrote")
