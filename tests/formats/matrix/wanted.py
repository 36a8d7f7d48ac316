"""The values that a framework restores from a checkpoint, which a load must give exactly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Wanted:
    """The expected values of a model and its optimizer.

    Attributes:
        parameters, buffers: tensors by their names in the model; floating-point ones as float32.
        state: tensors of the optimizer, by `<parameter>.<key>`; empty if the source has none.
        groups: the members and the hyperparameters of each param group.
        ties: the name of the tensor to which each tied parameter is tied.
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
        """Return all tensors by their names in a state."""
        model = {**self.parameters, **self.buffers}
        model |= {name: model[same] for name, same in self.ties.items()}
        found = {f"model.{name}": tensor for name, tensor in model.items()}
        return found | {f"optimizer.{name}": tensor for name, tensor in self.state.items()}

    def settings(self) -> dict[str, Settings]:
        """Return the hyperparameters of each trained parameter."""
        return {name: settings for members, settings in self.groups for name in members}


def grouped(settings: Mapping[str, Settings]) -> tuple[tuple[tuple[str, ...], Settings], ...]:
    """Return param groups, given the hyperparameters of each parameter."""
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
    """Return the expected values, given tensors by their names in a state.

    The names of buffers end with one of `buffers`.
    """
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
    """Return a floating-point tensor as float32, because FSDP does not flatten mixed dtypes."""
    return tensor.float() if tensor.is_floating_point() else tensor
