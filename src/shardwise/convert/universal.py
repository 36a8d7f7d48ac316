"""DeepSpeed's universal checkpoints: a file for each parameter and each key of its state.

ZeRO 1 and 2 look for model states under another name than ZeRO 3, and for hyperparameters in
another place: both are written, so that one checkpoint is for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.convert.archive import Growing
from shardwise.convert.chosen import Chosen
from shardwise.convert.nested import Nested, Optimizer, nested
from shardwise.convert.output import Output, Part, Target
from shardwise.convert.torchsave import add_torch_file, refusal
from shardwise.errors import StateError
from shardwise.formats.optimizers import GROUPS, PARAM_NAMES, PARAMS
from shardwise.formats.readers.deepspeed.files import LATEST_UNIVERSAL, WEIGHTS

VERSION = "0.19.8"
"""Of DeepSpeed, whose layout this is."""
_COUNTERS = [("deepspeed", kind) for kind in ("global_steps", "global_samples", "skipped_steps")]
MASTER = "float32"
STEP = "step"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MODEL_STATES, _MODEL_STATES_OF_ZERO_3 = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)


def universal_target(chosen: Chosen) -> Target:
    """Lay out what DeepSpeed reads if it is configured with `load_universal`.

    Weights and the optimizer's state are in float32. What is not trained is with the model states,
    from where DeepSpeed itself does not restore it.

    Raises:
        StateError: there is no model, or not one optimizer.
    """
    state = nested(chosen)
    training = _training(chosen, state)
    step = chosen.source.step
    folder = "universal" if step is None else f"global_step{step}_universal"
    values, left_out = _values(state, chosen.root)
    said = _model_states(training, step or 0) | values
    said["module"] |= values.get("module", {})
    files = {
        "zero/optimizer_state.pt": _hyperparameters(training),
        _MODEL_STATES: said,
        _MODEL_STATES_OF_ZERO_3: said | {"module": {}},
    }
    for name in training.names():
        atoms = _atoms(training, name)
        files |= {f"zero/{name}/{key}.pt": value for key, value in atoms}
    _check(files)
    outputs = tuple(_file(f"{folder}/{name}", value) for name, value in files.items())
    latest = {LATEST_UNIVERSAL: folder.encode()}
    left_out += [*state.left_out, *_beyond(training)]
    return Target(outputs, lambda sums: latest, tuple(left_out))


def _check(files: Iterable[str]) -> None:
    for name in files:
        parts = name.split("/")
        if not all(map(_PLAIN.fullmatch, parts)) or {".", ".."} & set(parts):
            raise StateError(
                f"{name[:200]!r}: DeepSpeed's universal format names files by parameters and their "
                "states, and this is no path of letters, digits, dots, _ and -: a spec= renames it"
            )


@dataclass(frozen=True, slots=True)
class _Training:
    """What is trained, and by what: the model by name, param groups with `PARAM_NAMES`."""

    model: Mapping[str, Any]
    optimizer: Optimizer
    groups: list[dict[str, Any]]

    def names(self) -> list[str]:
        """Of all parameters, those that are tied once."""
        return [name for group in self.groups for name in group[PARAM_NAMES]]

    def fits(self, name: str, key: str) -> bool:
        """Whether state can be an atom: DeepSpeed cuts it as it cuts the weights."""
        value = self.optimizer.state[name][key]
        return key == STEP or (
            isinstance(value, Part) and value.box.shape == self.model[name].box.shape
        )


def _training(chosen: Chosen, state: Nested) -> _Training:
    model = {
        path[1]: leaf for path, leaf in state.parts.items() if path[0] == chosen.root and path[1:]
    }
    if not model or len(state.optimizers) != 1:
        raise StateError(
            "DeepSpeed's universal format holds a model and its optimizer: there are "
            f"{len(model)} names below {chosen.root!r}, and {len(state.optimizers)} optimizers; "
            "root= and skip= choose"
        )
    (optimizer,) = state.optimizers.values()
    training = _Training(model, optimizer, optimizer.numbered()[GROUPS])
    for name in training.names():
        if not isinstance(model.get(name), Part):
            raise StateError(f"{name}: the optimizer has it, and what is written of the model not")
    return training


def _file(name: str, value: Any) -> Output:
    file = Growing(name)
    add_torch_file(file, value, name)
    return file.output()


def _atoms(training: _Training, name: str) -> Iterator[tuple[str, Any]]:
    """What there is of a parameter, by key."""
    yield WEIGHTS, {"param": _master(training.model[name])}
    for key, value in training.optimizer.state.get(name, {}).items():
        if key == STEP:
            yield key, value
        elif training.fits(name, key):
            yield key, {"param": _master(value)}


def _master(part: Part) -> Part:
    return Part(part.name, part.box, MASTER)


def _beyond(training: _Training) -> Iterator[str]:
    """What state is in no atom, and why."""
    names = set(training.names())
    for name, values in training.optimizer.state.items():
        if name not in names and training.optimizer.ties.get(name) not in names:
            yield f"{name}: its state is of no parameter in a group"
        elif name in names:
            for key in values:
                if not training.fits(name, key):
                    yield f"{name}.{key}: state that has not the shape of its parameter"


def _hyperparameters(training: _Training) -> dict[str, Any]:
    """Hyperparameters, for ZeRO 1 and 2 at the top; for ZeRO 3 below, with a step of each group."""
    settings = []
    states = {}
    for number, group in enumerate(training.groups):
        kept = {key: value for key, value in group.items() if key not in (PARAMS, PARAM_NAMES)}
        settings.append({**kept, PARAMS: [number]})
        held = [training.optimizer.state.get(name, {}) for name in group[PARAM_NAMES]]
        states[number] = next(({STEP: each[STEP]} for each in held if STEP in each), {})
    return {
        "ds_version": VERSION,
        GROUPS: settings,
        "optimizer_state_dict": {"state": states, GROUPS: settings},
    }


def _model_states(training: _Training, step: int) -> dict[str, Any]:
    """What lies beside the atoms; to say which of the rest are buffers, nothing is known."""
    model = training.model
    shapes = [
        {name: torch.Size(model[name].box.shape) for name in group[PARAM_NAMES]}
        for group in training.groups
    ]
    trained = set(training.names())
    tied = {n: owner for n, owner in training.optimizer.ties.items() if owner in trained}
    rest = {n: leaf for n, leaf in model.items() if n not in trained and n not in tied}
    return {
        "module": rest,
        "buffer_names": [name for name, leaf in rest.items() if isinstance(leaf, Part)],
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


def _values(state: Nested, root: str) -> tuple[dict[str, Any], list[str]]:
    """All but the model, by the keys that DeepSpeed has for it; and why some is left out.

    What users gave to DeepSpeed to be saved has keys beside DeepSpeed's own.
    """
    values: dict[str, Any] = {}
    left_out = []
    for path, value in state.parts.items():
        if path[0] == root:
            continue
        why = refusal(value, ".".join(path))
        if why:
            left_out.append(why)
        elif path == ("scheduler",):
            values["lr_scheduler"] = value
        elif path[1:] and (path[0] == "client_state" or path in _COUNTERS):
            values[path[1]] = value
        elif path[0] == "deepspeed":
            left_out.append(f"{'.'.join(path)}: it is of the engine that wrote it")
        else:
            *above, key = path
            (values.setdefault(above[0], {}) if above else values)[key] = value
    return values, left_out
