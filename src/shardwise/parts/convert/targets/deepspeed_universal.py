"""Plan DeepSpeed's universal checkpoints: one file for each parameter and each key of its state.

ZeRO 1 and 2 read model states and hyperparameters from other files and keys than ZeRO 3. Both kinds
are written, so that all stages of ZeRO can load the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.kernel.errors import StateError
from shardwise.parts.convert.plan import ExportContents, ExportFiles, OutputFile, TensorPart
from shardwise.parts.convert.targets.nested import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    NestedOptimizer,
    NestedState,
    nest_state,
)
from shardwise.parts.convert.targets.torch_file import add_torch_file, unloadable_reason

VERSION = "0.19.8"
"""The version of DeepSpeed whose layout is written."""
LATEST_UNIVERSAL, WEIGHTS_KEY = "latest_universal", "fp32"
_COUNTERS = [
    ("deepspeed", counter) for counter in ("global_steps", "global_samples", "skipped_steps")
]
MASTER_DTYPE = "float32"
STEP = "step"
_FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MODEL_STATES, _MODEL_STATES_OF_ZERO_3 = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)


def plan_universal_files(contents: ExportContents) -> ExportFiles:
    """Plan the files that DeepSpeed reads with `load_universal`.

    Weights and the optimizer's state become float32. Untrained tensors are stored with the model
    states. DeepSpeed itself does not restore untrained tensors from there.

    Raises:
        StateError: the checkpoint has no model, or only its trained part; or not exactly one
            optimizer.
    """
    contents.refuse_partial_model()
    state = nest_state(contents)
    training = _training_state(contents, state)
    step = contents.source.step
    folder = "universal" if step is None else f"global_step{step}_universal"
    values, left_out = _other_values(state, contents.model_key)
    model_states = _model_states(training, step or 0) | values
    model_states["module"] |= values.get("module", {})
    files = {
        "zero/optimizer_state.pt": _hyperparameters(training),
        _MODEL_STATES: model_states,
        _MODEL_STATES_OF_ZERO_3: model_states | {"module": {}},
    }
    for name in training.parameter_names():
        entries = _parameter_files(training, name)
        files |= {f"zero/{name}/{key}.pt": value for key, value in entries}
    _check_file_names(files)
    tensor_files = tuple(_plan_file(f"{folder}/{name}", value) for name, value in files.items())
    latest = {LATEST_UNIVERSAL: folder.encode()}
    left_out += [*state.left_out, *_describe_unwritten_state(training)]
    return ExportFiles(tensor_files, lambda sums: latest, tuple(left_out))


def _check_file_names(files: Iterable[str]) -> None:
    for name in files:
        parts = name.split("/")
        if not all(map(_FILE_NAME.fullmatch, parts)) or {".", ".."} & set(parts):
            raise StateError(
                f"{name[:200]!r}: DeepSpeed's universal format names files after parameters, which "
                "may have only letters, digits, dots, _ and -: rename the parameter with spec="
            )


@dataclass(frozen=True, slots=True)
class _TrainingState:
    """A model and its optimizer.

    Attributes:
        model: tensors and values of the model by name.
        groups: the param groups, which list the names of their parameters.
    """

    model: Mapping[str, Any]
    optimizer: NestedOptimizer
    groups: list[dict[str, Any]]

    def parameter_names(self) -> list[str]:
        """Return the names of all parameters. Tied parameters are listed once."""
        return [name for group in self.groups for name in group[PARAM_NAMES]]

    def is_writable(self, name: str, key: str) -> bool:
        """Return whether the format can hold a value: a step, or a tensor of its weight's shape."""
        value = self.optimizer.state[name][key]
        return key == STEP or (
            isinstance(value, TensorPart) and value.box.shape == self.model[name].box.shape
        )


def _training_state(contents: ExportContents, state: NestedState) -> _TrainingState:
    model = {
        path[1]: leaf
        for path, leaf in state.parts.items()
        if path[0] == contents.model_key and path[1:]
    }
    if not model or len(state.optimizers) != 1:
        raise StateError(
            "DeepSpeed's universal format holds one model and its optimizer, but the checkpoint "
            f"has {len(model)} names below {contents.model_key!r} and {len(state.optimizers)} "
            "optimizers: set model_key= to the key of the model, and leave out others with skip="
        )
    (optimizer,) = state.optimizers.values()
    training = _TrainingState(model, optimizer, optimizer.indexed_state_dict()[GROUPS])
    for name in training.parameter_names():
        if not isinstance(model.get(name), TensorPart):
            raise StateError(
                f"{name}: the optimizer has this parameter, but the model below "
                f"{contents.model_key!r} does not: check model_key=, only= and skip="
            )
    return training


def _plan_file(name: str, value: Any) -> OutputFile:
    file = OutputFile(name)
    add_torch_file(file, value, name)
    return file


def _parameter_files(training: _TrainingState, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the contents of a parameter's files, by key: its weight and its state."""
    yield WEIGHTS_KEY, {"param": _as_float32(training.model[name])}
    for key, value in training.optimizer.state.get(name, {}).items():
        if key == STEP:
            yield key, value
        elif training.is_writable(name, key):
            yield key, {"param": _as_float32(value)}


def _as_float32(part: TensorPart) -> TensorPart:
    return TensorPart(part.name, part.box, MASTER_DTYPE)


def _describe_unwritten_state(training: _TrainingState) -> Iterator[str]:
    """Describe the state that is not written, with reasons."""
    names = set(training.parameter_names())
    for name, values in training.optimizer.state.items():
        if name not in names and training.optimizer.ties.get(name) not in names:
            yield f"{name}: it has state, but is not in any param group"
        elif name in names:
            for key in values:
                if not training.is_writable(name, key):
                    yield f"{name}.{key}: its shape differs from that of its parameter"


def _hyperparameters(training: _TrainingState) -> dict[str, Any]:
    """Return the hyperparameters twice: for ZeRO 1 and 2; and, with step counts, for ZeRO 3."""
    settings = []
    states = {}
    for group_index, group in enumerate(training.groups):
        hyperparameters = {
            key: value for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)
        }
        settings.append({**hyperparameters, PARAMS: [group_index]})
        group_states = [training.optimizer.state.get(name, {}) for name in group[PARAM_NAMES]]
        states[group_index] = next(
            ({STEP: each[STEP]} for each in group_states if STEP in each), {}
        )
    return {
        "ds_version": VERSION,
        GROUPS: settings,
        "optimizer_state_dict": {"state": states, GROUPS: settings},
    }


def _model_states(training: _TrainingState, step: int) -> dict[str, Any]:
    """Return the model states. All untrained tensors count as buffers."""
    model = training.model
    shapes = [
        {name: torch.Size(model[name].box.shape) for name in group[PARAM_NAMES]}
        for group in training.groups
    ]
    trained = set(training.parameter_names())
    tied = {name: owner for name, owner in training.optimizer.ties.items() if owner in trained}
    untrained = {
        name: leaf for name, leaf in model.items() if name not in trained and name not in tied
    }
    return {
        "module": untrained,
        "buffer_names": [name for name, leaf in untrained.items() if isinstance(leaf, TensorPart)],
        "param_shapes": shapes,
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": tied,
        "optimizer": None,
        "lr_scheduler": None,
        "global_steps": step,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
    }


def _other_values(state: NestedState, model_key: str) -> tuple[dict[str, Any], list[str]]:
    """Return all values outside of the model, by DeepSpeed's keys, and the names left out.

    The entries of `client_state`, which users pass to DeepSpeed, become top-level keys.
    """
    values: dict[str, Any] = {}
    left_out = []
    for path, value in state.parts.items():
        if path[0] == model_key:
            continue
        reason = unloadable_reason(value, ".".join(path))
        if reason:
            left_out.append(reason)
        elif path == ("scheduler",):
            values["lr_scheduler"] = value
        elif path[1:] and (path[0] == "client_state" or path in _COUNTERS):
            values[path[1]] = value
        elif path[0] == "deepspeed":
            left_out.append(f"{'.'.join(path)}: internal state of the engine that wrote it")
        else:
            *above, key = path
            (values.setdefault(above[0], {}) if above else values)[key] = value
    return values, left_out
