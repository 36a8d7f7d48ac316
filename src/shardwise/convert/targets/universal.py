"""DeepSpeed universal checkpoints: a file for each parameter and each key of its state.

ZeRO 1 and 2 read model states and hyperparameters from other places than ZeRO 3. Both are written,
so that all stages can load the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.convert.plan import Chosen, Output, Part, Target
from shardwise.convert.targets.archive import Growing
from shardwise.convert.targets.nested import Nested, Optimizer, nested
from shardwise.convert.targets.torch_file import add_torch_file, refusal
from shardwise.errors import StateError
from shardwise.formats.optimizers import GROUPS, PARAM_NAMES, PARAMS
from shardwise.formats.readers.deepspeed.files import LATEST_UNIVERSAL, WEIGHTS_KEY

VERSION = "0.19.8"
"""The version of DeepSpeed whose layout is written."""
_COUNTERS = [("deepspeed", kind) for kind in ("global_steps", "global_samples", "skipped_steps")]
MASTER = "float32"
STEP = "step"
_PLAIN = re.compile(r"[A-Za-z0-9._-]{1,255}")
_MODEL_STATES, _MODEL_STATES_OF_ZERO_3 = (
    "mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_model_states.pt",
)


def universal_target(chosen: Chosen) -> Target:
    """Plan the files that DeepSpeed reads with `load_universal`.

    Weights and the optimizer's state are float32. Tensors that are not trained are stored with the
    model states, from which DeepSpeed itself does not restore them.

    Raises:
        StateError: there is no model, or not exactly one optimizer.
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
                f"{name[:200]!r}: invalid file name; DeepSpeed's universal format names files "
                "after parameters, of letters, digits, dots, _ and -: rename it with spec="
            )


@dataclass(frozen=True, slots=True)
class _Training:
    """The model by name, its optimizer, and the param groups with `PARAM_NAMES`."""

    model: Mapping[str, Any]
    optimizer: Optimizer
    groups: list[dict[str, Any]]

    def names(self) -> list[str]:
        """Return the names of all parameters; tied ones once."""
        return [name for group in self.groups for name in group[PARAM_NAMES]]

    def fits(self, name: str, key: str) -> bool:
        """Return whether state has the shape of its weight, by which DeepSpeed shards it."""
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
            "DeepSpeed's universal format holds one model and its optimizer, but there are "
            f"{len(model)} names below {chosen.root!r} and {len(state.optimizers)} optimizers: "
            "select them with root= and skip="
        )
    (optimizer,) = state.optimizers.values()
    training = _Training(model, optimizer, optimizer.numbered()[GROUPS])
    for name in training.names():
        if not isinstance(model.get(name), Part):
            raise StateError(
                f"{name}: the optimizer has this parameter, but the model that is written does not"
            )
    return training


def _file(name: str, value: Any) -> Output:
    file = Growing(name)
    add_torch_file(file, value, name)
    return file.output()


def _atoms(training: _Training, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the weight and the state of a parameter, by key."""
    yield WEIGHTS_KEY, {"param": _master(training.model[name])}
    for key, value in training.optimizer.state.get(name, {}).items():
        if key == STEP:
            yield key, value
        elif training.fits(name, key):
            yield key, {"param": _master(value)}


def _master(part: Part) -> Part:
    return Part(part.name, part.box, MASTER)


def _beyond(training: _Training) -> Iterator[str]:
    """Yield the state that is not written, and why."""
    names = set(training.names())
    for name, values in training.optimizer.state.items():
        if name not in names and training.optimizer.ties.get(name) not in names:
            yield f"{name}: it has state, but is not in any param group"
        elif name in names:
            for key in values:
                if not training.fits(name, key):
                    yield f"{name}.{key}: its shape differs from that of its parameter"


def _hyperparameters(training: _Training) -> dict[str, Any]:
    """Return hyperparameters: on top for ZeRO 1 and 2; nested, with group steps, for ZeRO 3."""
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
    """Return the model states. Tensors that are not trained all count as buffers."""
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
    """Return everything but the model, by DeepSpeed's keys; and what is left out, with reasons.

    The client state of users has the same level as DeepSpeed's own keys.
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
            left_out.append(f"{'.'.join(path)}: internal state of the engine that wrote it")
        else:
            *above, key = path
            (values.setdefault(above[0], {}) if above else values)[key] = value
    return values, left_out
