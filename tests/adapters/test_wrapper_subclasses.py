"""Subclasses of tensors that wrap other tensors: waited for, or refused by name, but never tied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

import shardwise as sw
from shardwise.integrations import dcp
from tests.tools.gang import Gang


def reduced(value: float, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """Return a sum over two ranks that may still be under way."""
    result = funcol.all_reduce(torch.full(shape, value / 2), "sum", dist.group.WORLD)
    assert isinstance(result, funcol.AsyncCollectiveTensor)
    assert result.data_ptr() == 0
    return result


class WithExtraState(nn.Module):
    """Has buffers and extra state that collectives compute."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("first", first)
        self.register_buffer("second", second)
        self.extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Meter:
    """A Stateful whose values are results of collectives."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, state: Any) -> None:
        self.values = state


def gathered(mesh: Any, *rows: float) -> DTensor:
    """Return a replicated DTensor whose local tensor may still be under way."""
    own = torch.tensor(rows) + dist.get_rank() * 100
    whole = DTensor.from_local(own, mesh, [Shard(0)]).redistribute(
        mesh, [Replicate()], async_op=True
    )
    assert isinstance(whole._local_tensor, funcol.AsyncCollectiveTensor)
    return whole


def tensors_in(place: str) -> dict[str, list[float]]:
    saved = sw.open(place)
    found = ((name, saved[name]) for name in saved)
    return {
        name: tensor.tensor().reshape(-1).tolist()
        for name, tensor in found
        if isinstance(tensor, sw.SavedTensor)
    }


def save_and_load_unfinished(place: str) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(torch.zeros(4))
    optimizer = torch.optim.AdamW([parameter])
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        "exp_avg": reduced(1.0, (4,)),
        "exp_avg_sq": reduced(2.0, (4,)),
        "history": [reduced(3.0, (2,)), (reduced(4.0, (2,)), {"a": reduced(5.0, (2,))})],
    }
    module = WithExtraState(reduced(6.0, (3,)), reduced(7.0, (3,)))
    module.register_parameter("weight", parameter)
    module.extra = [reduced(8.0), reduced(9.0)]
    box = sw.Box((0,), (2,))
    state: dict[str, Any] = {
        "loss": reduced(1.5),
        "tokens": reduced(4096.0),
        "view": reduced(16.0, (2, 3)).t(),
        "one": gathered(mesh, 1, 2),
        "two": gathered(mesh, 3, 4),
        "list": [reduced(10.0), reduced(11.0)],
        "meter": Meter({"a": reduced(12.0), "b": (reduced(13.0),)}),
        "shards": sw.Shards((2,), torch.float32, [(box, reduced(14.0, (2,)))]),
        "other": sw.Shards((2,), torch.float32, [(box, reduced(15.0, (2,)))]),
        "model": module,
        "optimizer": optimizer,
    }
    sw.save(place, state)
    values = tensors_in(place)
    fresh: dict[str, Any] = {
        **state,
        "loss": reduced(0.0),
        "tokens": reduced(0.0),
        "list": None,
        "meter": Meter(None),
        "one": gathered(mesh, 0, 0),
        "two": gathered(mesh, 0, 0),
        "model": WithExtraState(reduced(0.0, (3,)), reduced(0.0, (3,))),
    }
    fresh["model"].register_parameter("weight", parameter)
    sw.load(place, fresh)
    moments = optimizer.state[parameter]
    return values | {
        "loaded": [
            *map(float, (fresh["loss"], fresh["tokens"], *fresh["list"])),
            *map(float, (fresh["meter"].values["a"], fresh["meter"].values["b"][0])),
            *fresh["one"].full_tensor().tolist(),
            *fresh["two"].full_tensor().tolist(),
            *fresh["model"].first.tolist(),
            *fresh["model"].second.tolist(),
            *map(float, fresh["model"].extra),
            *moments["exp_avg"].tolist(),
            *moments["exp_avg_sq"].tolist(),
            *moments["history"][0].tolist(),
            *moments["history"][1][0].tolist(),
            *moments["history"][1][1]["a"].tolist(),
        ]
    }


def test_results_of_collectives_are_waited_for(tmp_path: Path, gang: Gang) -> None:
    for values in gang.run(save_and_load_unfinished, str(tmp_path / "c"), world=2):
        assert values["loss"] == [1.5]
        assert values["tokens"] == [4096.0]
        assert values["view"] == [16.0] * 6
        assert values["one"] == [1, 2, 101, 102]
        assert values["two"] == [3, 4, 103, 104]
        assert values["list.0"] + values["list.1"] == [10, 11]
        assert values["meter.a"] + values["meter.b.0"] == [12, 13]
        assert values["shards"] + values["other"] == [14, 14, 15, 15]
        assert values["model.first"] + values["model.second"] == [6] * 3 + [7] * 3
        assert values["optimizer.weight.exp_avg"] == [1.0] * 4
        assert values["optimizer.weight.exp_avg_sq"] == [2.0] * 4
        assert values["loaded"] == [
            *(1.5, 4096.0, 10, 11, 12, 13),
            *(1, 2, 101, 102, 3, 4, 103, 104),
            *(6, 6, 6, 7, 7, 7, 8, 9),
            *(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 4, 4, 5, 5),
        ]


def save_unfinished_with_dcp(place: str, *, is_async: bool) -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "loss": reduced(1.5),
        "tokens": reduced(4096.0),
        "one": gathered(mesh, 1, 2),
        "two": gathered(mesh, 3, 4),
        "list": [reduced(10.0), reduced(11.0)],
    }
    if is_async:
        dcp.async_save(state, checkpoint_id=place).result()
    else:
        dcp.save(state, checkpoint_id=place)
    dist.barrier()
    values = tensors_in(place)
    target = {"loss": reduced(0.0), "tokens": reduced(0.0), "one": gathered(mesh, 0, 0)}
    dcp.load(target, checkpoint_id=place)
    values["loaded"] = [float(target["loss"]), float(target["tokens"])]
    values["loaded"] += target["one"].full_tensor().tolist()
    return values


@pytest.mark.parametrize("is_async", [False, True])
def test_results_of_collectives_are_waited_for_in_dcp(
    tmp_path: Path, gang: Gang, is_async: bool
) -> None:
    place = str(tmp_path / "c")
    for values in gang.run(save_unfinished_with_dcp, place, is_async=is_async, world=2):
        assert values["loss"] + values["tokens"] == [1.5, 4096.0]
        assert values["one"] + values["two"] == [1, 2, 101, 102, 3, 4, 103, 104]
        assert values["list.0"] + values["list.1"] == [10, 11]
        assert values["loaded"] == [1.5, 4096.0, 1, 2, 101, 102]


class Opaque(torch.Tensor):
    """Wraps a tensor without saying so: it has no memory, and no `__tensor_flatten__`."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{func} is not for {cls.__name__}")
        return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner))


class Quantized(Opaque):
    """Has a method for a plain tensor, as tensors of torchao do."""

    def dequantize(self) -> torch.Tensor:
        return self.inner.clone()


def fake(n: int) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(n)


MAKERS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "TwoTensor": (
        lambda: TwoTensor(torch.ones(3), torch.zeros(3)),
        r"TwoTensor.*(wraps other tensors \(a, b\): put its parts|has no rule: register a rule)",
    ),
    "MaskedTensor": (
        lambda: masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
        r"MaskedTensor.*wraps other tensors.*or a plain tensor$",
    ),
    "Opaque": (lambda: Opaque(torch.ones(3)), r"Opaque.*wraps other tensors.*or a plain tensor$"),
    "Quantized": (
        lambda: Quantized(torch.ones(3)),
        r"Quantized.*or a plain tensor, for example \.dequantize\(\)$",
    ),
    "FakeTensor": (lambda: fake(3), r"FakeTensor.*no values"),
}


class WithWrapped(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor)


def in_optimizer(tensor: torch.Tensor) -> dict[str, Any]:
    module = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1)
    optimizer.state[module.weight] = {"x": tensor}
    return {"model": module, "optimizer": optimizer}


PLACES: dict[str, tuple[Callable[[torch.Tensor], dict[str, Any]], str]] = {
    "item": (lambda t: {"x": t}, "x"),
    "in a list": (lambda t: {"x": [t]}, r"x\.0"),
    "Stateful": (lambda t: {"x": Meter({"y": t})}, r"x\.y"),
    "module": (lambda t: {"x": WithWrapped(t)}, r"x\.weight"),
    "optimizer": (in_optimizer, r"optimizer\.weight\.x"),
    "per rank": (lambda t: {"x": sw.PerRank(Meter(t), resize=lambda *a: a[0][0])}, "x"),
    "Shards": (lambda t: {"x": sw.Shards((3,), t.dtype, [(sw.Box((0,), (3,)), t)])}, "x"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MAKERS)
def test_what_has_no_memory_is_refused_by_name(tmp_path: Path, kind: str, place: str) -> None:
    if kind == "TwoTensor" and place in ("item", "module"):
        pytest.skip("its inner tensors are saved: see tests/tensor_classes")
    make, said = MAKERS[kind]
    put, name = PLACES[place]
    with pytest.raises(sw.StateError, match=rf"^{name}: .*{said}"):
        sw.save(tmp_path / "c", put(make()))
    assert not (tmp_path / "c").exists()
    sw.save(tmp_path / "c", put(torch.ones(3)))
    builds_anew = (kind, place) == ("TwoTensor", "optimizer")  # state is built as it was saved
    if place != "per rank" and not builds_anew:  # a load only replaces this value
        with pytest.raises(sw.StateError, match=rf"^{name}: .*{said}"):
            sw.load(tmp_path / "c", put(make()))


@pytest.mark.parametrize("kind", ["TwoTensor", "FakeTensor"])  # torch's planner takes no others
def test_dcp_refuses_them_by_name(tmp_path: Path, kind: str) -> None:
    make, said = MAKERS[kind]
    with pytest.raises(BaseException, match=rf"x: .*{said}"):
        dcp.save({"x": make()}, checkpoint_id=tmp_path / "c")


def test_subclasses_with_memory_are_saved(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    x, y = (torch.full((3,), value).as_subclass(Named) for value in (1.0, 2.0))
    sw.save(tmp_path, {"x": x, "y": y, "again": x, "empty": x[:0], "none": y[:0]})
    target = {name: torch.zeros(3).as_subclass(Named) for name in ("x", "y", "again")}
    sw.load(tmp_path, target, strict=False)
    assert [tensor.tolist() for tensor in target.values()] == [[1] * 3, [2] * 3, [1] * 3]
