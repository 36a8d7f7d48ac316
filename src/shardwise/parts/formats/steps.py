"""The steps of checkpoints of other libraries: in the path, or chosen by a file in a root."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.manifest import step_of_directory
from shardwise.kernel.store import LocalStore, Store, resolve_links

MOST_STEPS_SHOWN = 5
TRACKER, LARGEST_TRACKER = "latest_checkpointed_iteration.txt", 100
"""The file with which Megatron-LM and verl name the newest step of a root."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_NUMBERED_STEP = r"(?:(?:global|train)[-_]?)?(?:step|iter|iteration)[-_=]?([0-9]{1,18})"
_STEP_IN_NAME = re.compile(
    r"(?:(?:model|ckpt|checkpoint|state|weights|epoch[-_=]?[0-9]+)[-_.])*"
    rf"{_NUMBERED_STEP}(?:[-_.](?:v[0-9]+|last|final|best|ema|universal|rank[-_]?[0-9]+))*"
    r"(?:\.[a-z]+)*"
)
_STEP_IN_FOLDER = re.compile(
    rf"(?=global_?step|[a-z_]*[-_=][0-9]){_NUMBERED_STEP}|checkpoint-([0-9]{{1,18}})"
)
_STEP_OF_LIGHTNING = re.compile(
    r"(?:^|(?<=-))(?<!max-)(?<!num-)(?<!per-)(?:global_|train_)?step=([0-9]{1,18})(?=$|[-.][a-z])"
)
_PART_OF_STEP = re.compile(
    r"(?:actor|critic|policy|value|ref|rm|reward(?:_model)?|rollout|model|module|weights|optim|optimizer|last|state"
    r"|train_state|trainer_state|training_state|extra_state|ckpt|checkpoint|dcp|dist_ckpt|sharded"
    r"|consolidated|huggingface|hf|meta|lit_model|pytorch_model|(?:pytorch_model_fsdp|optimizer)_0"
    r"|(?:model|optim)_world_size_1_rank_0|mp_rank_[0-9]+(?:_[0-9]+)*(?:_model_states)?)(?:\.[a-z]+)*"
)
"""What frameworks call the parts of a checkpoint, whose directory then has the name of the step."""


def _step_in_parts(parts: Sequence[str]) -> int | None:
    """Return the step in the path of a checkpoint, given as components; None if it has none.

    A number counts only where frameworks write the training step: `global_step_200`, `step-500`,
    `iter_0000100`, `checkpoint-500` of a directory, `epoch=1-step=500.ckpt`; also in a directory
    above, if the names below are those of parts: `global_step_200/actor/dist_ckpt`. Epochs and
    mere numbers (`checkpoint_3`) do not count: a wrong step is worse than none.
    """
    name = parts[-1]
    match = _STEP_IN_NAME.fullmatch(name)
    for folder in (name, *reversed(parts[:-1])):
        if match is not None or not (folder is name or _PART_OF_STEP.fullmatch(name)):
            break
        match = _STEP_IN_FOLDER.fullmatch(folder) or _STEP_OF_LIGHTNING.search(folder)
        name = folder
    return None if match is None else int(next(filter(None, match.groups())))


def find_directory(store: Store, names: Sequence[str], step: object) -> str:
    """Return the directory of a step, or of its tensors, in a place of another library, or "".

    Megatron-LM and verl keep the newest step in a file of the root, and NeMo has all tensors of a
    step in a folder.

    Raises:
        FormatError: the directory of the step is missing.
    """
    if {"weights", "context"} <= {*names}:
        return "weights"
    if TRACKER not in names or any(n == ".metadata" or n.startswith("mp_rank_") for n in names):
        return ""
    text = str(step)
    if step == "newest":
        text = store.read(TRACKER, limit=LARGEST_TRACKER).decode(errors="replace").strip()
    wanted = text
    if text.isascii() and text.isdigit():
        wanted = f"iter_{int(text):07d}"
        if f"global_step_{int(text)}" in names:
            wanted = f"global_step_{int(text)}"
    if wanted in names:
        # The reader of Megatron-LM's old format reads whole roots.
        is_old = any(name.startswith("mp_rank_") for name in store.at(wanted).list())
        return "" if is_old and step == "newest" else wanted
    steps = sorted(name for name in names if name.startswith(("iter_", "global_step_")))
    existing = ", ".join(steps[-MOST_STEPS_SHOWN:])
    says = f"{TRACKER} says {text!r}, and" if step == "newest" else f"step={text}:"
    raise FormatError(
        f"{store}: {says} {wanted[:40]} is missing: copy it from a complete copy of the checkpoint"
        + (f", or open one of the iterations that exist: {existing}" if existing else "")
    )


def step_in_path(place: Store) -> int | None:
    """Return the step in the path of a checkpoint; None if it has none.

    If a link leads to the checkpoint, either path may have the step, but not two of them.
    """
    paths = [place, resolve_links(place)] if type(place) is LocalStore else [place]
    found = {
        step
        for path in paths
        if (step := _step_in_parts(str(path).partition("?")[0].split("/"))) is not None
    }
    return found.pop() if len(found) == 1 else None


def newest_first(names: Iterable[str]) -> list[str]:
    """Return the names that a training loop may have given to checkpoints, newest first.

    A checkpoint is a `.ckpt` file, or has a number, such as `checkpoint-500` or `step10.pt`. The
    last number is its step.
    """
    return sorted(filter(_is_named_as_step, names), key=_order_of_step, reverse=True)


def _is_named_as_step(name: str) -> bool:
    """Return whether a training loop may have given this name to a checkpoint."""
    has_number = _NUMBER.search(name) is not None and step_of_directory(name) is None
    return has_number or name.endswith(".ckpt")


def _order_of_step(name: str) -> tuple[int, str]:
    """Return the last number in a name, and the name, to sort checkpoints by their steps."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1, name
