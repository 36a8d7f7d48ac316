"""What a framework itself has of a checkpoint: what a load must give, element for element."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """What is to be loaded of a model and its optimizer.

    Attributes:
        parameters, buffers: by their names in the model; what has floats has them as float32.
        state: of the optimizer, by `<parameter>.<key>`; empty where the source has none.
        groups: of each param group its members and its hyperparameters.
        ties: parameters that are others.
        frozen: parameters that are not trained.
        rename: as for `shardwise.load`.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    groups: tuple[tuple[tuple[str, ...], Settings], ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rename: Mapping[str, str] | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by the names that they have in a state."""
        model = {**self.parameters, **self.buffers}
        model |= {name: model[same] for name, same in self.ties.items()}
        found = {f"model.{name}": tensor for name, tensor in model.items()}
        return found | {f"optimizer.{name}": tensor for name, tensor in self.state.items()}

    def settings(self) -> dict[str, Settings]:
        """The hyperparameters of each trained parameter."""
        return {name: settings for members, settings in self.groups for name in members}


def grouped(settings: Mapping[str, Settings]) -> tuple[tuple[tuple[str, ...], Settings], ...]:
    """Param groups, of the hyperparameters of each parameter."""
    groups: list[tuple[tuple[str, ...], Settings]] = []
    for name, each in settings.items():
        for at, (members, known) in enumerate(groups):
            if known == each:
                groups[at] = ((*members, name), known)
                break
        else:
            groups.append(((name,), each))
    return tuple(groups)


def of_names(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Settings], buffers: Iterable[str]
) -> Wanted:
    """What is wanted, by names as they are in a state; buffers end as one of `buffers` does."""
    ends = tuple(buffers)
    below: dict[str, dict[str, torch.Tensor]] = {"model": {}, "optimizer": {}}
    for full, tensor in tensors.items():
        root, _, name = full.partition(".")
        below[root][name] = tensor
    model = {name: widened(tensor) for name, tensor in below["model"].items()}
    return Wanted(
        parameters={name: each for name, each in model.items() if not name.endswith(ends)},
        buffers={name: each for name, each in model.items() if name.endswith(ends)},
        state=below["optimizer"],
        groups=grouped(settings),
    )


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The same, or the same as float32: FSDP flattens no parameters of several dtypes."""
    return tensor.float() if tensor.is_floating_point() else tensor
