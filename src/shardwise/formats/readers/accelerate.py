"""Directories written by accelerate's `save_state` and the Trainer of transformers.

Weights are those of a published model, or of FSDP: a whole file or a DCP folder. The optimizer is a
file or folder too. Schedulers and registered objects are files of torch.save.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from shardwise.errors import FormatError
from shardwise.formats.file_tree import FileTree
from shardwise.formats.foreign import Foreign
from shardwise.formats.nested import (
    NestedLeaves,
    build_foreign,
    find_leaves,
    join_foreign,
    join_leaves,
)
from shardwise.formats.piece_tables import tie_equal_arrays
from shardwise.formats.readers import huggingface
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.formats.readers.dcp.reader import count_ranks, leaves_of, read_content
from shardwise.formats.readers.torch_save import read_value

FORMAT = "accelerate"
FSDP_MODEL, OPTIMIZER, SCHEDULER = "pytorch_model_fsdp", "optimizer", "scheduler"
REGISTERED_OBJECT = "custom_checkpoint"
TRAINER_STATE = "trainer_state.json"
_DCP_METADATA_FILE = re.compile(rf"({FSDP_MODEL}|{OPTIMIZER})_(\d{{1,4}})/{re.escape(METADATA)}")
_TORCH_FILE = re.compile(
    rf"({FSDP_MODEL}|{OPTIMIZER}|{SCHEDULER}|scaler|{REGISTERED_OBJECT})(?:_(\d{{1,4}}))?\.(?:bin|pt|pkl)"
)
_MODEL_OR_OPTIMIZER_FILE = re.compile(
    rf"{FSDP_MODEL}\.bin|{FSDP_MODEL}_0/{re.escape(METADATA)}|{OPTIMIZER}\.(?:bin|pt)"
)
_TRAINING_RUN_FILE = re.compile(rf"{re.escape(TRAINER_STATE)}|{SCHEDULER}\.(?:bin|pt)")
_RANDOM_STATE_FILE = re.compile(r"(?:random_states|rng_state)(?:_(\d{1,7}))?\.(?:pkl|pth)")
_FSDP_FILE_OF_RANK = re.compile(rf"{FSDP_MODEL}(?:_\d+)?_rank\d+\.bin")
_FURTHER_MODEL_FILE = re.compile(r"(?:pytorch_)?model_\d+\.(?:bin|safetensors)")
_LARGEST_TRAINER_STATE = 2**28


def recognise(tree: FileTree) -> bool:
    """Return whether a tree has accelerate's files of an optimizer or of FSDP weights.

    Published weights with other files of a training run count too: the optimizer may not have been
    saved or copied.
    """
    if tree.single_file is not None:
        return False
    if any(map(_MODEL_OR_OPTIMIZER_FILE.fullmatch, tree.sizes)):
        return True
    has_run_files = any(
        _TRAINING_RUN_FILE.fullmatch(n) or _RANDOM_STATE_FILE.fullmatch(n) for n in tree.sizes
    )
    return has_run_files and huggingface.recognise(tree)


def read(tree: FileTree) -> Foreign:
    """Read a directory of `Accelerator.save_state`, or a `checkpoint-…` of the Trainer.

    Keys are `model`, `optimizer`, `scheduler`, `scaler`, then `optimizer_1` and so on. Registered
    objects are `custom_checkpoint_0` and so on.

    Raises:
        FormatError: a file is malformed, contains objects that are not read from pickles, or has
            FSDP weights of a single rank.
    """
    if any(map(_FSDP_FILE_OF_RANK.fullmatch, tree.sizes)):
        raise FormatError(
            f"{tree}: each rank wrote its own FSDP weights (LOCAL_STATE_DICT), and no file "
            "says how they fit together: load the checkpoint with accelerate, and save it with "
            "fsdp_state_dict_type SHARDED_STATE_DICT"
        )
    parts: list[NestedLeaves] = []
    for read_part in _list_part_readers(tree):
        parts.append(read_part(sum(len(part.files) for part in parts)))
    leaves = join_leaves(*parts)
    trainer_state = _read_trainer_state(tree)
    values = dict(leaves.values)
    if trainer_state:
        values["trainer_state",] = trainer_state
    left_out = [*leaves.left_out, *_list_left_out(tree)]
    foreign = build_foreign(replace(leaves, values=values, left_out=left_out), FORMAT)
    if huggingface.recognise(tree) and not any(FSDP_MODEL in file.name for file in leaves.files):
        foreign = join_foreign(huggingface.read(tree), foreign)
    random_states = sum(1 for name in tree.sizes if _RANDOM_STATE_FILE.fullmatch(name))
    step = trainer_state.get("global_step")
    return replace(
        tie_equal_arrays(foreign),
        format=FORMAT,
        step=step if type(step) is int and step >= 0 else None,
        world_size=max(count_ranks(leaves.files), random_states),
        missing_files=_find_missing_files(tree),
    )


def _find_missing_files(tree: FileTree) -> dict[str, str]:
    """Return missing files that were probably written, judging by the others."""
    contents = {
        match[1]
        for name in tree.sizes
        for match in (_DCP_METADATA_FILE.fullmatch(name), _TORCH_FILE.fullmatch(name))
        if match is not None
    }
    has_trainer_files = TRAINER_STATE in tree.sizes or "scheduler.pt" in tree.sizes
    missing_files = {}
    if FSDP_MODEL not in contents and not huggingface.recognise(tree):
        missing_files["model"] = "the file of the model's weights (as model.safetensors)"
    if OPTIMIZER not in contents:
        is_dcp = f"{FSDP_MODEL}_0/{METADATA}" in tree.sizes
        file = "optimizer.pt" if has_trainer_files else "optimizer.bin"
        missing_files[OPTIMIZER] = f"{OPTIMIZER}_0/{METADATA}" if is_dcp else file
    elif has_trainer_files and SCHEDULER not in contents:
        missing_files[SCHEDULER] = "scheduler.pt"
    if has_trainer_files and TRAINER_STATE not in tree.sizes:
        missing_files["trainer_state"] = TRAINER_STATE
    return missing_files


def _list_part_readers(tree: FileTree) -> Iterator[partial[NestedLeaves]]:
    """Yield a function for each folder or file that reads it, given the index of its first file."""
    for name in tree.sizes:
        if match := _DCP_METADATA_FILE.fullmatch(name):
            folder = name.removesuffix(METADATA)
            yield partial(_read_dcp_folder, tree, folder, _make_state_key(match[1], match[2]))
        elif match := _TORCH_FILE.fullmatch(name):
            yield partial(_read_torch_file, tree, name, _make_state_key(match[1], match[2]))


def _make_state_key(content: str, number: str | None) -> str:
    """Return the key in the state. The first of its kind has no number, unless all have one."""
    if content == REGISTERED_OBJECT:
        return f"{content}_{number or 0}"
    key = "model" if content == FSDP_MODEL else content
    return f"{key}_{int(number)}" if number and int(number) else key


def _read_dcp_folder(tree: FileTree, folder: str, key: str, first_file_index: int) -> NestedLeaves:
    metadata = read_metadata(tree, f"{folder}{METADATA}")
    content = read_content(tree, metadata, folder=folder, first_file_index=first_file_index)
    return leaves_of(content, metadata, lambda path: (key, *path[1:]))


def _read_torch_file(tree: FileTree, name: str, key: str, file_index: int) -> NestedLeaves:
    return find_leaves({key: read_value(tree, name, file_index)}, (tree.file(name),))


def _read_trainer_state(tree: FileTree) -> Mapping[str, Any]:
    """Return the Trainer's state, with its step and log; it is empty if there is no file."""
    if TRAINER_STATE not in tree.sizes:
        return {}
    data = tree.read(TRAINER_STATE, limit=_LARGEST_TRAINER_STATE)
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{tree.label(TRAINER_STATE)}: not a JSON object ({error}): copy the file again from "
            "an intact source"
        ) from error


def _list_left_out(tree: FileTree) -> Iterator[str]:
    for name in tree.sizes:
        if _RANDOM_STATE_FILE.fullmatch(name):
            yield f"{name}: random states of a rank; they belong to the program"
        elif name in ("sampler.bin", "dl_state_dict.bin", "training_args.bin"):
            yield f"{name}: data loader state or arguments; open the file itself"
        elif _FURTHER_MODEL_FILE.fullmatch(name):
            yield f"{name}: weights of a further model; open the file itself"
