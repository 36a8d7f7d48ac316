"""Whatever an optimizer's state_dict() returns comes back as it was, or the save refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.adapters.test_optimizers import assert_equal, model, train
from tests.tools.gang import Gang


class Shared(optim.SGD):
    """Keeps state that belongs to no parameter, under keys of several types."""

    def step(self, closure: Any = None) -> Any:
        state: dict[Any, Any] = self.state
        if "k" not in state:
            state["k"] = torch.tensor([1.0])
            state[7] = {"n": 0, "history": [torch.zeros(2, dtype=torch.float64)]}
            state["a", 0] = "even"
        state["k"] *= 0.5
        state[7]["n"] += 1
        state[7]["history"].append(torch.full((state[7]["n"],), 0.25))
        state["a", 0] = ["even", "odd"][state[7]["n"] % 2]
        for group in self.param_groups:
            group["lr"] = float(state["k"]) * len(state[7]["history"]) / len(state["a", 0])
        return super().step(closure)


class StrangeKeys(optim.SGD):
    """Names its state of a parameter with keys that are not plain names."""

    keys: Any = (0, "m.1", ("m", 0), "", "other_keys", True, "plain", 1.5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {key: torch.zeros_like(parameter) for key in self.keys}
                    state["inner"] = {"a.b": torch.zeros_like(parameter), 3: {"n": 0}}
                state["inner"][3]["n"] += 1
                state["inner"]["a.b"] += parameter.grad
                for index, key in enumerate(self.keys):
                    state[key].add_(parameter.grad, alpha=index + 1)
                    parameter.sub_(state[key] * state["inner"][3]["n"], alpha=0.01)
                parameter.sub_(state["inner"]["a.b"], alpha=0.01)


class Overriding(optim.AdamW):
    """Adds entries to its state dict, as optimizers that count or anneal for themselves do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.seen, self.scales = 0, [torch.ones(2)]

    def step(self, closure: Any = None) -> Any:
        self.seen += 1
        self.scales.append(self.scales[-1] * 0.5)
        for group in self.param_groups:
            group["lr"] = 0.1 / self.seen + float(self.scales[-1][0])
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "seen": self.seen, 3: {"scales": self.scales}}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.seen, self.scales = state_dict["seen"], state_dict[3]["scales"]


def hooked(parameters: Any) -> optim.Optimizer:
    """Adds an entry, and halves the moments in the file, by hooks."""
    made = optim.AdamW(parameters)
    made.count = 0  # type: ignore[attr-defined]

    def before_step(optimizer: Any, *_: Any) -> None:
        optimizer.count += 1
        optimizer.param_groups[0]["lr"] = 0.1 / optimizer.count

    def add(optimizer: Any, found: Any) -> Any:
        states = {
            index: {**state, "exp_avg": state["exp_avg"] / 2}
            for index, state in found["state"].items()
        }
        return {**found, "state": states, "count": optimizer.count}

    def before(optimizer: Any, given: Any) -> Any:
        optimizer.count = given["count"]
        states = {
            index: {**state, "exp_avg": state["exp_avg"] * 2}
            for index, state in given["state"].items()
        }
        return {**given, "state": states}

    made.register_step_pre_hook(before_step)
    made.register_state_dict_post_hook(add)
    made.register_load_state_dict_pre_hook(before)
    return made


class Derived(optim.SGD):
    """Computes an attribute when state is set."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.total = 0.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 / (1 + self.total)
        super().step(closure)
        self._sum()

    def _sum(self) -> None:
        buffers = [each["momentum_buffer"] for each in self.state.values() if each]
        self.total = float(sum(each.abs().sum() for each in buffers))

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._sum()


class Projector:
    """An object in the state, as GaLore keeps one for each parameter."""

    def __init__(self, rank: int) -> None:
        self.rank, self.inner = rank, Pair()
        self.basis: Any = None
        self.history: list[Any] = []

    def project(self, gradient: torch.Tensor) -> Any:
        if self.basis is None or len(self.history) % 2 == 0:
            self.basis = gradient.sign() + 1
        self.history.append(torch.tensor(float(len(self.history))))
        self.inner.count += 1
        return gradient * self.basis * self.inner.count


class Pair:
    count = 0


class Projecting(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    projector = state.setdefault("deep", {}).setdefault("one", Projector(2))
                    parameter.sub_(projector.project(parameter.grad), alpha=0.01)


class Hidden:
    """An object that has more than attributes."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError


def test_objects_come_back_with_their_class(tmp_path: Path) -> None:
    first: Any = model()
    second: Any = model()
    optimizer, other = (Projecting(each.parameters(), lr=0.1) for each in (first, second))
    train(first, optimizer, 3)
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    names = set(sw.open(tmp_path))
    assert {"optimizer.0.weight.deep.one.basis", "optimizer.0.weight.deep.one.rank"} <= names
    sw.load(tmp_path, {"model": second, "optimizer": other})
    loaded = other.state[second[0].weight]["deep"]["one"]
    assert type(loaded) is Projector
    assert type(loaded.inner) is Pair
    assert loaded.rank == 2
    plain = optim.SGD(first.parameters(), lr=0.1)
    before = second[0].weight.detach().clone()
    first[0].weight.data.zero_()
    with pytest.raises(
        sw.MismatchError, match=r"one\.__class__: '.*:Projector' is no simple class"
    ):
        sw.load(tmp_path, {"model": first, "optimizer": plain})
    assert not first[0].weight.any()
    assert torch.equal(before, second[0].weight)


def test_objects_with_more_than_attributes_are_refused(tmp_path: Path) -> None:
    module: Any = model()
    optimizer = Projecting(module.parameters(), lr=0.1)
    for strange in (Hidden(), object(), sw.RngState()):
        optimizer.state[module[0].weight] = {"strange": strange}
        with pytest.raises(sw.StateError, match=r"optimizer\.0\.weight\.strange: .* cannot be"):
            sw.save(tmp_path, {"model": module, "optimizer": optimizer})


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "shared": lambda p: Shared(p, lr=0.1, momentum=0.9),
    "strange keys": lambda p: StrangeKeys(p, lr=0.1),
    "overriding": Overriding,
    "hooked": hooked,
    "derived": Derived,
    "objects": lambda p: Projecting(p, lr=0.1),
}


def normalized(value: Any) -> Any:
    """The text of a state dict, with sorted keys, and bytes in place of tensors."""
    if isinstance(value, dict):
        return sorted((repr(key), normalized(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return [repr(type(value)), *map(normalized, value)]
    if isinstance(value, torch.Tensor):
        return repr((value.dtype, tuple(value.shape), value.tolist()))
    if isinstance(value, (Projector, Pair)):
        return [repr(type(value)), normalized(vars(value))]
    return repr(value)


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh target", "stepped target"])
@pytest.mark.parametrize("name", MAKERS)
def test_it_goes_on_bit_for_bit(tmp_path: Path, name: str, stepped: bool) -> None:
    first, second = model(), model()
    optimizer, other = MAKERS[name](first.parameters()), MAKERS[name](second.parameters())
    train(first, optimizer, 3)
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    expected = normalized(optimizer.state_dict())
    if stepped:
        train(second, other, 1)
    sw.load(tmp_path, {"model": second, "optimizer": other})
    assert normalized(other.state_dict()) == expected
    train(first, optimizer, 2)
    train(second, other, 2)
    assert_equal(first, second)


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_from_before_the_first_step_removes_state(tmp_path: Path, name: str) -> None:
    module = model()
    optimizer = MAKERS[name](module.parameters())
    sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    train(module, optimizer, 2)
    sw.load(tmp_path, {"model": module, "optimizer": optimizer})
    assert not optimizer.state


def test_several_optimizers_keep_their_own(tmp_path: Path) -> None:
    def make(steps: int) -> tuple[nn.Module, list[Any]]:
        module = nn.ModuleList([model(), model()])
        made = [Shared(module[0].parameters(), lr=0.1), Overriding(module[1].parameters())]
        for part, optimizer, n in zip(module, made, (steps, 2 * steps), strict=True):
            train(part, optimizer, n)
        return module, made

    (first, optimizers), (second, others) = make(2), make(0)
    sw.save(tmp_path, {"model": first, "optimizer": optimizers})
    sw.load(tmp_path, {"model": second, "optimizer": others})
    for optimizer, other in zip(optimizers, others, strict=True):
        assert normalized(other.state_dict()) == normalized(optimizer.state_dict())
    assert others[0].state[7]["n"] == 2
    assert others[1].seen == 4


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    first: Any = model()
    second: Any = model()
    plain, other = optim.AdamW(first.parameters()), Overriding(second.parameters())
    train(first, plain, 1)
    sw.save(tmp_path, {"model": first, "optimizer": plain})
    with pytest.raises(sw.MismatchError, match=r"optimizer\.entries: not in the checkpoint"):
        sw.load(tmp_path, {"model": second, "optimizer": other})
    train(second, other, 1)
    sw.save(tmp_path / "other", {"model": second, "optimizer": other})
    with pytest.raises(sw.MismatchError, match=r"optimizer\.entries: in the checkpoint only"):
        sw.load(tmp_path / "other", {"model": first, "optimizer": plain})
    weight = plain.state[first[0].weight]["exp_avg"].clone()
    sw.load(tmp_path, {"model": second, "optimizer": other}, skip=["optimizer.entries"])
    assert torch.equal(other.state[second[0].weight]["exp_avg"], weight)
    assert other.seen == 1


@pytest.mark.parametrize("key", ["x", 5])
def test_values_that_cannot_be_saved_are_named(tmp_path: Path, key: Any) -> None:
    module: Any = model()
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[key] = object()
    with pytest.raises(sw.StateError, match=rf"optimizer\.shared_state\.{key}: "):
        sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    optimizer.state.clear()
    optimizer.state[module[0].weight] = {key: torch.ones(2), str(key): torch.zeros(2), "m": 0}
    if key == 5:
        optimizer.state[module[0].weight] = {5: torch.ones(2), "5.": 0, (5,): lambda: 0}
        with pytest.raises(sw.StateError, match=r"optimizer\.0\.weight\.other_keys\.\(5,\): "):
            sw.save(tmp_path, {"model": module, "optimizer": optimizer})


def test_what_is_not_loaded_is_not_touched(tmp_path: Path) -> None:
    module: Any = model()
    optimizer = optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    calls: list[Any] = []
    optimizer.register_load_state_dict_post_hook(calls.append)
    sw.load(tmp_path, {"model": module, "optimizer": optimizer}, only=["model.*"])
    assert not calls
    sw.load(tmp_path, {"model": module, "optimizer": optimizer})
    assert calls == [optimizer]
    optimizer.state[module[0].weight] = torch.ones(2)
    with pytest.raises(
        sw.StateError, match=r"state of a parameter of shape \[7, 5\].* is a Tensor"
    ):
        sw.save(tmp_path / "other", {"model": module, "optimizer": optimizer})


def test_state_of_tensors_in_no_group_is_refused(tmp_path: Path) -> None:
    module: Any = model()
    optimizer = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    train(module, optimizer, 1)
    del optimizer.param_groups[0]["params"][1]
    with pytest.raises(
        sw.StateError, match=r"state for a tensor of shape \[7, 5\] that is in none"
    ):
        sw.save(tmp_path, {"model": module, "optimizer": optimizer})


def test_moments_in_use_keep_their_dtype(tmp_path: Path) -> None:
    """`load_state_dict` of torch converts moments to the dtype of the parameters."""
    first, second = nn.Linear(2, 2).bfloat16(), nn.Linear(2, 2).bfloat16()
    optimizer, other = Overriding(first.parameters()), Overriding(second.parameters())
    for parameter in first.parameters():
        moments = {key: torch.rand(parameter.shape) for key in ("exp_avg", "exp_avg_sq")}
        moments["step"] = torch.tensor(3.0)
        optimizer.state[parameter] = {**moments, "deep": {"list": [torch.rand(3)]}}
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    sw.load(tmp_path, {"model": second, "optimizer": other})
    for a, b in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert torch.equal(a["exp_avg"], b["exp_avg"])
        assert b["exp_avg"].dtype == b["deep"]["list"][0].dtype == torch.float32
        assert torch.equal(a["deep"]["list"][0], b["deep"]["list"][0])


def share(place: str, differ: bool) -> None:
    torch.manual_seed(0)
    module: Any = fully_shard(nn.Linear(8, 8, bias=False))
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    (weight,) = module.parameters()
    state: dict[Any, Any] = optimizer.state
    state["ema"] = {"whole": weight.detach() * 2, "norm": torch.ones(()) * 3}
    state[weight] = {0: weight.detach() * 3}
    if differ:
        state["ema"]["norm"] += dist.get_rank()
    sw.save(place, {"model": module, "optimizer": optimizer})
    fresh: Any = fully_shard(nn.Linear(8, 8, bias=False))
    other = optim.SGD(fresh.parameters(), lr=0.1)
    sw.load(place, {"model": fresh, "optimizer": other})
    loaded: dict[Any, Any] = other.state
    assert float(loaded["ema"]["norm"]) == 3
    (fresh_weight,) = fresh.parameters()
    for times, got in ((2, loaded["ema"]["whole"]), (3, loaded[fresh_weight][0])):
        whole = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert torch.equal(whole, fresh_weight.detach().full_tensor() * times)


def test_shared_state_of_ranks_must_be_equal(tmp_path: Path, gang: Gang) -> None:
    gang.run(share, str(tmp_path / "equal"), False, world=2)
    for outcome in gang.run_outcomes(share, str(tmp_path / "other"), True, world=2):
        assert "optimizer.shared_state.checksums" in str(outcome.exception)
