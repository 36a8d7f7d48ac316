"""Optimizers whose state has other shapes than the parameters, or lies on one rank only.

They are small, and faithful in what they keep: names, shapes, placements, owners. What they compute
from whole gradients does not depend on how parameters are divided.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """The value, divided as the tensor is."""
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton and Schulz's iteration, as Muon has it."""
    x = matrix / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def root_of(factor: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(factor + 1e-4 * torch.eye(len(factor)))
    return vectors @ values.pow(-0.25).diag() @ vectors.T


class Each(Optimizer):
    """Steps each parameter on its own, given its whole gradient."""

    def __init__(self, model: nn.Module) -> None:
        named = [*model.named_parameters()]
        super().__init__([parameter for _, parameter in named], {"lr": 0.05})
        self.names = {parameter: name for name, parameter in named}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.step_one(index, parameter)

    def step_one(self, index: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            update = self.update(parameter, whole(parameter.grad), self.state[parameter])
            parameter.sub_(like(parameter, self.param_groups[0]["lr"] * update))

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class ShampooOfDTensors(Each):
    """Factors are DTensors: the first is sharded, though by other rows than its parameter."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = torch.tensor(0.0)
            state["factors"] = {
                str(dim): self.make(parameter, torch.zeros(n, n), Replicate() if dim else Shard(0))
                for dim, n in enumerate(gradient.shape)
            }
            state["norm"] = self.make(parameter, torch.tensor(0.0), Replicate())
        state["step"] += 1
        state["norm"].add_(like(state["norm"], gradient.square().sum()))
        for dim, factor in state["factors"].items():
            rows = gradient.transpose(0, int(dim)).flatten(1) if gradient.dim() > 1 else gradient
            factor.add_(like(factor, rows @ rows.T if rows.dim() > 1 else rows.outer(rows)))
            gradient = gradient.transpose(0, int(dim))
            gradient = (root_of(whole(factor)) @ gradient).transpose(0, int(dim))
        return gradient / (1 + whole(state["norm"]).sqrt() / state["step"])

    def make(self, parameter: Tensor, value: Tensor, placement: Any) -> Tensor:
        if not isinstance(parameter, DTensor):
            return value
        mesh = parameter.device_mesh
        placements = [*[Replicate()] * (mesh.ndim - 1), placement]
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


class ShampooOfShards(Each):
    """Each rank preconditions its own shard: the factors are plain tensors of the shard."""

    def step_one(self, index: int, parameter: Tensor) -> None:
        local, gradient = (
            each.to_local() if isinstance(each, DTensor) else each
            for each in (parameter, parameter.grad)
        )
        state = self.state[parameter]
        if not state:
            state["factors"] = [torch.zeros(n, n) for n in gradient.shape]
        for dim, factor in enumerate(state["factors"]):
            rows = gradient.transpose(0, dim).reshape(len(factor), -1)
            factor += rows @ rows.T
            gradient = (root_of(factor) @ gradient.transpose(0, dim)).transpose(0, dim)
        local -= 0.05 * gradient


class AdamMini(Each):
    """One second moment for each row: a DTensor like a column of the parameter."""

    def step_one(self, index: int, parameter: Tensor) -> None:
        state, gradient = self.state[parameter], parameter.grad
        if not state:
            state["step"] = 0
            state["m"] = torch.zeros_like(parameter)
            column = parameter[:, 0:1] if parameter.dim() > 1 else parameter
            state["vmean"] = torch.zeros_like(column)
        state["step"] += 1
        squares = gradient * gradient
        rows = squares.mean(dim=1, keepdim=True) if parameter.dim() > 1 else squares
        state["vmean"].mul_(0.9).add_(rows, alpha=0.1)
        state["m"].lerp_(gradient, 0.1)
        parameter.sub_(0.05 * state["m"] / (state["vmean"].sqrt() + 1e-6) / state["step"])


class Soap(Each):
    """Adam in the eigenbasis of Shampoo's factors, which every rank has as plain tensors."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["step"] = 0
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(parameter) for _ in range(2))
            state["GG"] = [torch.zeros(n, n) for n in gradient.shape]
            state["Q"] = [torch.eye(n) for n in gradient.shape]
        state["step"] += 1
        for dim, factor in enumerate(state["GG"]):
            rows = gradient.transpose(0, dim).reshape(len(factor), -1)
            factor.lerp_(rows @ rows.T, 0.1)
            if state["step"] % 2:
                state["Q"][dim] = torch.linalg.qr(factor @ state["Q"][dim]).Q
        projected = self.rotate(gradient, [each.T for each in state["Q"]])
        state["exp_avg"].lerp_(like(parameter, projected), 0.1)
        state["exp_avg_sq"].lerp_(like(parameter, projected.square()), 0.1)
        update = whole(state["exp_avg"]) / (whole(state["exp_avg_sq"]).sqrt() + 1e-6)
        return self.rotate(update, state["Q"])

    def rotate(self, value: Tensor, bases: list[Tensor]) -> Tensor:
        for dim, basis in enumerate(bases):
            value = (basis @ value.transpose(0, dim)).transpose(0, dim)
        return value


class Projector:
    """As in GaLore: an object in the state, which has a matrix."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ortho_matrix: Tensor | None = None

    def project(self, gradient: Tensor, step: int) -> Tensor:
        if self.ortho_matrix is None or step % 3 == 0:
            self.ortho_matrix = torch.linalg.svd(gradient, full_matrices=False).Vh[: self.rank]
        return gradient @ self.ortho_matrix.T


class GaLore(Each):
    """Adam of projected gradients: smaller moments, and a projector in the state."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        step = state.setdefault("step", 0)
        if gradient.dim() > 1:
            projector = state.setdefault("projector", Projector(2))
            gradient = projector.project(gradient, step)
        state.setdefault("exp_avg", torch.zeros_like(gradient)).lerp_(gradient, 0.1)
        state.setdefault("exp_avg_sq", torch.zeros_like(gradient)).lerp_(gradient.square(), 0.1)
        state["step"] += 1
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
        return update @ projector.ortho_matrix if parameter.dim() > 1 else update


class Owned(Each):
    """Each parameter is stepped by the rank that owns it, which then sends it to all."""

    def step_one(self, index: int, parameter: Tensor) -> None:
        owner = index % dist.get_world_size()
        if owner == dist.get_rank():
            super().step_one(index, parameter)
        dist.broadcast(parameter, owner)


class MuonOfOwners(Owned):
    """As Keller Jordan's: the owner of a parameter has its momentum."""

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 0.1)
        return orthogonal(momentum) if parameter.dim() > 1 else momentum


class ShampooOfOwners(Owned, ShampooOfDTensors):
    """As the distributed Shampoo: factors are DTensors over a mesh of their owner alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.meshes = [DeviceMesh("cpu", [rank]) for rank in range(dist.get_world_size())]

    def make(self, parameter: Tensor, value: Tensor, placement: Any) -> Tensor:
        mesh = self.meshes[dist.get_rank()]
        return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
