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
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import Foreign
from shardwise.formats.nested import Leaves, combined, foreign_of, nested_leaves, united
from shardwise.formats.optimizers import Path
from shardwise.formats.piece_tables import with_ties
from shardwise.formats.readers import huggingface
from shardwise.formats.readers.dcp.metadata import METADATA, read_metadata
from shardwise.formats.readers.dcp.reader import leaves, read_stored, world_size
from shardwise.formats.tree import Tree

FORMAT = "accelerate"
FSDP_MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer"
TRAINER = "trainer_state.json"
_FOLDER = re.compile(rf"({FSDP_MODEL}|{OPTIMIZER})_(\d{{1,4}})/{re.escape(METADATA)}")
_FILE = re.compile(
    rf"({FSDP_MODEL}|{OPTIMIZER}|scheduler|scaler|custom_checkpoint)(?:_(\d{{1,4}}))?\.(?:bin|pt|pkl)"
)
_SHOWS = re.compile(
    rf"{FSDP_MODEL}\.bin|{FSDP_MODEL}_0/{re.escape(METADATA)}|{OPTIMIZER}\.(?:bin|pt)"
)
_NOTED = re.compile(rf"{re.escape(TRAINER)}|scheduler\.(?:bin|pt)")
_RANDOM = re.compile(r"(?:random_states|rng_state)(?:_(\d{1,7}))?\.(?:pkl|pth)")
_OF_RANK = re.compile(rf"{FSDP_MODEL}(?:_\d+)?_rank\d+\.bin")
_FURTHER = re.compile(r"(?:pytorch_)?model_\d+\.(?:bin|safetensors)")
_LARGEST_STATE = 2**28


def recognise(tree: Tree) -> bool:
    """Whether a tree has accelerate's files of an optimizer or of FSDP weights.

    Published weights with other files of a training run count too: the optimizer may not have been
    saved or copied.
    """
    if tree.only is not None:
        return False
    noted = any(_NOTED.fullmatch(name) or _RANDOM.fullmatch(name) for name in tree.sizes)
    return any(map(_SHOWS.fullmatch, tree.sizes)) or (noted and huggingface.recognise(tree))


def read(tree: Tree) -> Foreign:
    """Read a directory of `Accelerator.save_state`, or a `checkpoint-…` of the Trainer.

    Keys are `model`, `optimizer`, `scheduler`, `scaler`, then `optimizer_1` and so on. Registered
    objects are `custom_checkpoint_0` and so on.

    Raises:
        FormatError: a file is malformed, contains objects that are not read from pickles, or has
            FSDP weights of a single rank.
    """
    if any(map(_OF_RANK.fullmatch, tree.sizes)):
        raise FormatError(
            f"{tree}: each rank wrote its own FSDP weights (LOCAL_STATE_DICT), and no file "
            "says how they fit together: save with SHARDED_STATE_DICT"
        )
    parts: list[Leaves] = []
    for part in _parts(tree):
        parts.append(part(sum(len(each.files) for each in parts)))
    found = united(*parts)
    trainer = _trainer(tree)
    noted: dict[Path, Any] = {("trainer_state",): trainer} if trainer else {}
    values = {**found.values, **noted}
    left_out = [*found.left_out, *_left_out(tree)]
    foreign = foreign_of(replace(found, values=values, left_out=left_out), FORMAT)
    if huggingface.recognise(tree) and not any(FSDP_MODEL in file.name for file in found.files):
        foreign = combined(huggingface.read(tree), foreign)
    ranks = sum(1 for name in tree.sizes if _RANDOM.fullmatch(name))
    step = trainer.get("global_step")
    return replace(
        with_ties(foreign),
        format=FORMAT,
        step=step if type(step) is int and step >= 0 else None,
        world_size=max(world_size(found.files), ranks),
        absent=_absent(tree),
    )


def _absent(tree: Tree) -> dict[str, str]:
    """Return missing files that were probably written, judging by the others."""
    kinds = {match[1] for name in tree.sizes for match in _matches(name)}
    trainer = TRAINER in tree.sizes or "scheduler.pt" in tree.sizes
    absent = {}
    if FSDP_MODEL not in kinds and not huggingface.recognise(tree):
        absent["model"] = "the file of the model's weights (as model.safetensors)"
    if OPTIMIZER not in kinds:
        folder = f"{FSDP_MODEL}_0/{METADATA}" in tree.sizes
        file = "optimizer.pt" if trainer else "optimizer.bin"
        absent[OPTIMIZER] = f"{OPTIMIZER}_0/{METADATA}" if folder else file
    elif trainer and "scheduler" not in kinds:
        absent["scheduler"] = "scheduler.pt"
    if trainer and TRAINER not in tree.sizes:
        absent["trainer_state"] = TRAINER
    return absent


def _matches(name: str) -> Iterator[re.Match[str]]:
    """Yield the match of a file name with the pattern of folders or files."""
    yield from filter(None, (_FOLDER.fullmatch(name), _FILE.fullmatch(name)))


def _parts(tree: Tree) -> Iterator[partial[Leaves]]:
    """Yield a function that reads each folder or file, given the number of its first file."""
    for name in tree.sizes:
        if found := _FOLDER.fullmatch(name):
            yield partial(_folder, tree, name.removesuffix(METADATA), _name(found[1], found[2]))
        elif found := _FILE.fullmatch(name):
            yield partial(_file, tree, name, _name(found[1], found[2]))


def _name(kind: str, number: str | None) -> str:
    """Return the key in the state. The first of its kind has no number, unless all have one."""
    if kind == "custom_checkpoint":
        return f"{kind}_{number or 0}"
    plain = "model" if kind == FSDP_MODEL else kind
    return f"{plain}_{int(number)}" if number and int(number) else plain


def _folder(tree: Tree, folder: str, key: str, first: int) -> Leaves:
    metadata = read_metadata(tree, f"{folder}{METADATA}")
    stored = read_stored(tree, metadata, folder=folder, first=first)

    def moved(path: Path) -> Path:
        return (key, *path[1:])

    return leaves(stored, metadata, moved)


def _file(tree: Tree, name: str, key: str, first: int) -> Leaves:
    with tree.open_range(name, first) as part:
        value = read_torch_file(part, opaque=tree.opaque).value
    return nested_leaves({key: value}, (tree.file(name),))


def _trainer(tree: Tree) -> Mapping[str, Any]:
    """Read the Trainer's state: its step and log."""
    if TRAINER not in tree.sizes:
        return {}
    try:
        return msgspec.json.decode(tree.read(TRAINER, limit=_LARGEST_STATE), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{tree}/{TRAINER} is malformed: {error}") from error


def _left_out(tree: Tree) -> Iterator[str]:
    for name in tree.sizes:
        if _RANDOM.fullmatch(name):
            yield f"{name}: random states of a rank; they belong to the program"
        elif name in ("sampler.bin", "dl_state_dict.bin", "training_args.bin"):
            yield f"{name}: data loader state or arguments; open the file itself"
        elif _FURTHER.fullmatch(name):
            yield f"{name}: weights of a further model; open the file itself"
