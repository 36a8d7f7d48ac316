"""The training step in the path of a checkpoint, where frameworks write it."""

from __future__ import annotations

import re
from collections.abc import Sequence

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


def step_in_path(parts: Sequence[str]) -> int | None:
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
