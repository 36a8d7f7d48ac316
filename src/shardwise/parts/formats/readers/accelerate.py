"""Directories written by accelerate's `save_state` and the Trainer of transformers.

Weights are those of a published model, or of FSDP: a whole file or a DCP folder. The optimizer is a
file or folder too. Schedulers and registered objects are files of torch.save.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from shardwise.parts.formats.reader import Builder, FileTree, FormatError, Reader
from shardwise.parts.formats.readers.dcp.metadata import METADATA
from shardwise.parts.formats.readers.dcp.reader import read_state
from shardwise.parts.formats.readers.huggingface import READER as PUBLISHED_MODEL

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
    return has_run_files and PUBLISHED_MODEL.recognise(tree)


def read(tree: FileTree, builder: Builder) -> None:
    """Read a directory of `Accelerator.save_state`, or a `checkpoint-…` of the Trainer.

    Keys are `model`, `optimizer`, `scheduler`, `scaler`, then `optimizer_1` and so on. Registered
    objects are `custom_checkpoint_0` and so on.

    Raises:
        FormatError: a file is malformed, contains objects of classes that shardwise does not read,
            or has FSDP weights of a single rank.
    """
    if any(map(_FSDP_FILE_OF_RANK.fullmatch, tree.sizes)):
        raise FormatError(
            f"{tree}: each rank wrote its own FSDP weights (LOCAL_STATE_DICT), and no file "
            "says how they fit together: load the checkpoint with accelerate, and save it with "
            "fsdp_state_dict_type SHARDED_STATE_DICT"
        )
    parts = {
        name: match
        for name in tree.sizes
        if (match := _DCP_METADATA_FILE.fullmatch(name) or _TORCH_FILE.fullmatch(name)) is not None
    }
    contents = {match[1] for match in parts.values()}
    has_published_weights = PUBLISHED_MODEL.recognise(tree)
    if has_published_weights and FSDP_MODEL not in contents:
        PUBLISHED_MODEL.read(tree, builder)
    for name, match in parts.items():
        key = _make_state_key(match[1], match[2])
        if name.endswith(METADATA):
            state = read_state(tree, builder, name)
            inner = next(iter(state.values())) if len(state) == 1 else state
            builder.add_state({key: inner}, is_ordered=False)
        else:
            builder.add_file(name)
            builder.add_state({key: tree.load(name)})
    trainer_state: Mapping[str, Any] = {}
    if TRAINER_STATE in tree.sizes:
        trainer_state = tree.read_json(TRAINER_STATE, dict[str, Any], "a JSON object")
    if trainer_state:
        builder.add_value("trainer_state", trainer_state)
    builder.left_out += _list_left_out(tree)
    random_states = sum(1 for name in tree.sizes if _RANDOM_STATE_FILE.fullmatch(name))
    builder.world_size = max(builder.world_size, random_states)
    if has_published_weights:
        contents.add(FSDP_MODEL)
    builder.missing_files = _find_missing_files(tree, contents)
    builder.step = trainer_state.get("global_step")


READER = Reader("accelerate", recognise, read, overrides=("hf", "torch-ranks"))


def _find_missing_files(tree: FileTree, contents: Collection[str]) -> dict[str, str]:
    """Return missing files that were probably written, judging by the contents of the others."""
    has_trainer_files = TRAINER_STATE in tree.sizes or "scheduler.pt" in tree.sizes
    missing_files = {}
    if FSDP_MODEL not in contents:
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


def _make_state_key(content: str, number: str | None) -> str:
    """Return the key in the state. The first of its kind has no number, unless all have one."""
    if content == REGISTERED_OBJECT:
        return f"{content}_{number or 0}"
    key = "model" if content == FSDP_MODEL else content
    return f"{key}_{int(number)}" if number and int(number) else key


def _list_left_out(tree: FileTree) -> Iterator[str]:
    for name in tree.sizes:
        if _RANDOM_STATE_FILE.fullmatch(name):
            yield f"{name}: random states of a rank; they belong to the program"
        elif name in ("sampler.bin", "dl_state_dict.bin", "training_args.bin"):
            yield f"{name}: data loader state or arguments; open the file itself"
        elif _FURTHER_MODEL_FILE.fullmatch(name):
            yield f"{name}: weights of a further model; open the file itself"
