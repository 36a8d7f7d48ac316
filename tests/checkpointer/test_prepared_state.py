"""A Checkpointer that remembers a state saves the same bytes as one that does not.

Each save is compared with a `sw.save` of the same state, which remembers nothing: the tensors, the
values and the bytes of all ranks must be the same.
"""

from __future__ import annotations

import copy
import enum
import gc
import json
import random
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from tests.breadth import mostly_long

State = dict[str, Any]
Change = Callable[[State], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Linear(4, 4)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(4, 4))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def make_state() -> State:
    torch.manual_seed(0)
    model = Net()
    groups = [{"params": [*model.body.parameters()]}, {"params": [model.embed.weight], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    step(optimizer)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "ema": {"a": torch.randn(4, 4), "b": torch.randn(4), "deep": {"c": torch.randn(2)}},
        "values": {"epoch": 3, "list": [1, torch.arange(3.0)], "array": np.arange(4)},
        "weight": nn.Parameter(torch.randn(3)),
        "rng": sw.RngState(),
    }


def contents(path: Path) -> tuple[Any, list[bytes]]:
    """The manifest without what differs between saves, and the data of all files."""
    manifest = json.loads((path / "manifest.json").read_bytes())
    for key in ("save_id", "created", "crc32", "step", "metrics"):
        del manifest[key]
    files = manifest.pop("files")
    data = []
    for name in sorted(each.name for each in path.glob("r*.safetensors")):
        encoded = (path / name).read_bytes()
        length = int.from_bytes(encoded[:8], "little")
        header = json.loads(encoded[8 : 8 + length])
        header.pop("__metadata__")
        ends = [each["data_offsets"] for key, each in header.items() if "checksums" not in key]
        last = max((stop for _, stop in ends), default=0)
        data.append(json.dumps(header).encode() + encoded[8 + length : 8 + length + last])
    assert len(data) == sum(count for each in files for _, _, count in each["ranks"])
    return manifest, data


class Saver:
    """Saves states by a Checkpointer, and compares each save with one of `sw.save`."""

    def __init__(self, root: Path) -> None:
        self.root, self.step = root, 0
        self.checkpointer = sw.Checkpointer(str(root / "run"), memory=None, telemetry=False)

    def save(self, state: State) -> str:
        """Save, and return why the tensors were looked for in the state."""
        self.step += 1
        torch.manual_seed(self.step)
        handle = self.checkpointer.save(self.step, state)
        assert handle is not None
        sw.save(self.root / f"plain-{self.step}", state)
        found = contents(self.root / "run" / f"step-{self.step:08d}")
        expected = contents(self.root / f"plain-{self.step}")
        assert found == expected
        return handle.report.why_bound


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path)


def train(state: State) -> None:
    """Change all values in place, as a training does."""
    tensors = [*state["model"].parameters(), *state["model"].buffers()]
    optimizer = state["optimizer"]
    if isinstance(optimizer, list):
        (optimizer,) = optimizer
    for parameter in filter(lambda each: isinstance(each, dict), optimizer.state.values()):
        tensors += [each for each in parameter.values() if isinstance(each, torch.Tensor)]
    tensors += [each for each in state["ema"].values() if isinstance(each, torch.Tensor)]
    with torch.no_grad():
        for tensor in filter(torch.is_tensor, tensors):
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.add_(1)


def first(state: State) -> nn.Parameter:
    return next(iter(state["model"].body.parameters()))


def moments(state: State) -> dict[str, Any]:
    return state["optimizer"].state[first(state)]


def replace_parameter(state: State) -> None:
    model, optimizer = state["model"], state["optimizer"]
    old = model.body[0].bias
    new = model.body[0].bias = nn.Parameter(old.detach() + 1)
    members = optimizer.param_groups[0]["params"]
    members[[id(each) for each in members].index(id(old))] = new
    optimizer.state[new] = optimizer.state.pop(old)


def set_storage(state: State) -> None:
    first(state).set_(torch.randn(4, 4))


def swap_data(state: State) -> None:
    a, b = state["model"].body[0].weight, state["model"].body[2].weight
    a.data, b.data = b.data, a.data


def swap_layers(state: State) -> None:
    body = state["model"].body
    body[0], body[2] = body[2], body[0]


def move_key(state: State) -> None:
    spare = state["model"].spare
    weight = spare.weight
    del spare.weight
    spare.register_parameter("moved", weight)


def move_between_modules(state: State) -> None:
    model = state["model"]
    mask = model.mask
    del model.mask
    model.spare.register_buffer("mask", mask)


def same_lists(state: State) -> None:
    """The flat lists of all keys and objects stay as they are."""
    spare, head = state["model"].spare._parameters, state["model"].head._parameters
    moved = {"bias": spare.pop("bias"), **head}
    head.clear()
    head.update(moved)


def rename_last(held: dict[str, Any]) -> None:
    _, value = held.popitem()
    held["renamed"] = value


def same_lists_of_moments(state: State) -> None:
    one, other = [*state["optimizer"].state.values()][:2]
    moved = {"last": one.pop("last"), **other}
    other.clear()
    other.update(moved)


def state_of_another(state: State) -> None:
    optimizer = state["optimizer"]
    _, held = optimizer.state.popitem()
    optimizer.state[state["model"].spare.weight] = held


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = nn.Linear(2, 2)


class ActivationWrapper(Plain):
    """Names lack the attribute of a class of this name."""


class FusedAdam(torch.optim.AdamW):
    """Counts its steps in the param groups."""


FusedAdam.__module__ = "apex.optimizers"


class Tagged(torch.Tensor):
    """A tensor that states its boxes."""

    global_shape, global_offsets = (4, 4), ((2, 0), (0, 0))
    local_offsets, local_sizes = ((0, 0), (2, 0)), ((2, 4), (2, 4))


def add_entry(state: State) -> None:
    def hook(module: nn.Module, entries: dict[str, Any], *_: object) -> None:
        entries["added"] = torch.ones(2)

    state["model"].register_state_dict_post_hook(hook)


def replace_entry_before(state: State) -> None:
    def hook(module: nn.Module, *_: object) -> None:
        module.mask = torch.full((4, 4), 7.0)

    state["model"].register_state_dict_pre_hook(hook)


def override_instance(state: State) -> None:
    model = state["model"]
    plain = model.state_dict

    def state_dict(*args: object, **kwargs: Any) -> Any:
        entries = plain(*args, **kwargs)
        return OrderedDict((key, value) for key, value in entries.items() if key != "mask")

    model.state_dict = state_dict


def override_class(state: State) -> None:
    class Other(type(state["model"].spare)):  # type: ignore[misc]
        def get_extra_state(self) -> object:
            return {"count": 5}

        def set_extra_state(self, state: object) -> None:
            pass

    state["model"].spare.__class__ = Other


def hook_of_optimizer(state: State) -> None:
    state["optimizer"].register_state_dict_post_hook(
        lambda optimizer, entries: {**entries, "added": 3}
    )


def override_optimizer(state: State) -> None:
    optimizer = state["optimizer"]
    plain = optimizer.state_dict
    optimizer.state_dict = lambda: {**plain(), "added": 4}


def class_of_optimizer(state: State) -> None:
    class Other(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return {**super().state_dict(), "added": 5}

    state["optimizer"].__class__ = Other


def inner_optimizer(state: State) -> None:
    inner = torch.optim.SGD(state["model"].body.parameters(), momentum=0.5)
    step(inner)
    for group in inner.param_groups:
        group.update({k: v for k, v in state["optimizer"].param_groups[0].items() if k != "params"})
    state["optimizer"].inner = inner


def add_group(state: State) -> None:
    state["optimizer"].add_param_group({"params": [*state["model"].spare.parameters()]})


def move_member(state: State) -> None:
    one, other = state["optimizer"].param_groups
    other["params"].append(one["params"].pop())


def order_of_members(state: State) -> None:
    state["optimizer"].param_groups[0]["params"].reverse()


def make_tie(state: State) -> None:
    state["model"].spare.weight = state["model"].body[0].weight


def break_tie(state: State) -> None:
    model = state["model"]
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def break_tie_of_memory(state: State) -> None:
    model = state["model"]
    model.head.weight = nn.Parameter(model.embed.weight.detach())


def state_of_shared(state: State) -> None:
    state["optimizer"].state["k"] = torch.ones(3)


class Key(str, enum.Enum):
    """Equal to plain keys, but the names of values have other text."""

    a = "a"


def another_key(new: str) -> Change:
    def change(state: State) -> None:
        average = state["ema"]
        state["ema"] = {new if key == "a" else key: value for key, value in average.items()}

    return change


def trainable(state: State) -> None:
    state["adapter"] = sw.trainable(nn.Linear(2, 2))


def trainable_in_place_of_value(state: State) -> None:
    state["values"]["epoch"] = sw.trainable(nn.Linear(2, 2))


class WithoutBias(dict[str, Any]):
    def items(self) -> Any:
        return [(key, value) for key, value in super().items() if key != "bias"]


def other_dict_of_parameters(state: State) -> None:
    spare = state["model"].spare
    spare.__dict__["_parameters"] = WithoutBias(spare._parameters)


def set_in(key: str, value: Callable[[State], object]) -> Change:
    return lambda state: state.__setitem__(key, value(state))


def ema(key: str, value: Callable[[State], object]) -> Change:
    return lambda state: state["ema"].__setitem__(key, value(state))


def moment(key: str, value: Callable[[State], object]) -> Change:
    return lambda state: moments(state).__setitem__(key, value(state))


def data(value: Callable[[torch.Tensor], torch.Tensor], name: str = "body.0.weight") -> Change:
    def change(state: State) -> None:
        parameter = state["model"].get_parameter(name)
        parameter.data = value(parameter.data)

    return change


def of_model(change: Callable[[Any], object]) -> Change:
    return lambda state: change(state["model"])


def of_optimizer(change: Callable[[Any], object]) -> Change:
    return lambda state: change(state["optimizer"])


def with_geometry(state: State) -> None:
    tensor: Any = state["ema"]["b"]
    tensor.global_shape, tensor.global_offsets = (4,), ((2,), (0,))
    tensor.local_offsets, tensor.local_sizes = ((0,), (2,)), ((2,), (2,))


def rename_key(state: State) -> None:
    state["average"] = state.pop("ema")


def reorder(state: State) -> None:
    state["ema"] = state.pop("ema")


CHANGES: dict[str, Change] = {
    "swapped tensors": lambda s: torch.utils.swap_tensors(
        s["model"].body[0].weight, s["model"].body[2].weight
    ),
    "shared memory": of_model(lambda m: m.share_memory()),
    "other offset in the storage": lambda s: s["ema"]["a"].set_(
        s["ema"]["a"].untyped_storage(), 4, (3, 4), (4, 1)
    ),
    "transposed in place": lambda s: s["ema"]["a"].t_(),
    "a key of another class": another_key(Key.a),
    "another key in the same place": another_key("other"),
    "sw.trainable": trainable,
    "sw.trainable in place of a value": trainable_in_place_of_value,
    "a dict of parameters of another class": other_dict_of_parameters,
    "data of a parameter": data(lambda t: t.clone() + 1),
    "data of another layout": data(lambda t: t.t().contiguous().t()),
    "data of another dtype": lambda s: s["model"].spare.to(torch.float64),
    "data of another shape": lambda s: data(lambda t: t.repeat(2, 1), "spare.weight")(s),
    "conjugated data": data(lambda t: t.conj(), "phase"),
    "negated data": data(lambda t: torch.complex(t.real, t.real).conj().imag + 0j, "phase"),
    "storage": set_storage,
    "exchanged data": swap_data,
    "resized in place": lambda s: s["ema"]["b"].resize_(2),
    "an expanded tensor": set_in("weight", lambda s: torch.randn(1).expand(4)),
    "part of a larger tensor": ema("b", lambda s: torch.randn(9)[2:6]),
    "a parameter": replace_parameter,
    "a moment": moment("exp_avg", lambda s: moments(s)["exp_avg"].clone() + 1),
    "dtype of a moment": moment("exp_avg", lambda s: moments(s)["exp_avg"].double()),
    "a moment more": moment("max_exp_avg_sq", lambda s: torch.ones(4, 4)),
    "a moment less": lambda s: moments(s).pop("exp_avg_sq"),
    "a moment of another order": moment("exp_avg", lambda s: moments(s).pop("exp_avg")),
    "a plain value in a moment": moment("count", lambda s: 5),
    "a nested moment": moment("nested", lambda s: {"a": torch.ones(2)}),
    "a moment with a dot": moment("a.b", lambda s: torch.ones(2)),
    "no state of a parameter": of_optimizer(lambda o: o.state.popitem()),
    "no state": of_optimizer(lambda o: o.state.clear()),
    "shared state": state_of_shared,
    "a buffer": of_model(lambda m: setattr(m, "mask", torch.zeros(4, 4))),
    "a new buffer": of_model(lambda m: m.register_buffer("new", torch.ones(2))),
    "a removed buffer": of_model(lambda m: delattr(m, "mask")),
    "a buffer that is None": of_model(lambda m: setattr(m, "mask", None)),
    "a persistent buffer": of_model(lambda m: m._non_persistent_buffers_set.discard("cache")),
    "a buffer that is not saved": of_model(lambda m: m._non_persistent_buffers_set.add("mask")),
    "a new parameter": of_model(lambda m: m.register_parameter("p", nn.Parameter(torch.ones(1)))),
    "a new module": of_model(lambda m: m.add_module("extra", nn.Linear(2, 2))),
    "a removed module": of_model(lambda m: delattr(m, "spare")),
    "a module that is None": of_model(lambda m: setattr(m, "spare", None)),
    "exchanged modules": swap_layers,
    "another name": move_key,
    "another module": move_between_modules,
    "another name of the last parameter": of_model(lambda m: rename_last(m.spare._parameters)),
    "another name of the last moment": lambda s: rename_last(moments(s)),
    "a class of a tensor": of_model(lambda m: setattr(m.mask, "__class__", Tagged)),
    "a negated view": data(torch._neg_view),
    "a hook": add_entry,
    "a hook before": replace_entry_before,
    "an override of the object": override_instance,
    "a class with extra state": override_class,
    "a wrapper": set_in("model", lambda s: nn.DataParallel(s["model"])),
    "a copy of the model": set_in("ema", lambda s: copy.deepcopy(s["model"])),
    "a hook of the optimizer": hook_of_optimizer,
    "an override of the optimizer": override_optimizer,
    "a class of the optimizer": class_of_optimizer,
    "an optimizer inside": inner_optimizer,
    "a param group": add_group,
    "a member of another group": move_member,
    "the order of members": order_of_members,
    "a tie": make_tie,
    "no tie": break_tie,
    "no tie, in the same memory": break_tie_of_memory,
    "a tie to a tensor": ema("b", lambda s: s["model"].body[0].bias.detach()),
    "frozen parameters": of_model(lambda m: m.requires_grad_(requires_grad=False)),
    "a tie in a dict": ema("a", lambda s: s["model"].mask),
    "a tensor of a dict": ema("a", lambda s: torch.randn(4, 4)),
    "another parameter of a dict": set_in("weight", lambda s: nn.Parameter(s["weight"].detach())),
    "a tensor more": ema("new", lambda s: torch.ones(1)),
    "a tensor less": lambda s: s["ema"].pop("b"),
    "a dict more": ema("more", lambda s: {"d": torch.ones(1)}),
    "an empty dict": ema("deep", lambda s: {}),
    "a dict with other keys": ema("deep", lambda s: {1: 2}),
    "a tensor that becomes a value": ema("b", lambda s: 5),
    "a tensor that becomes a module": ema("b", lambda s: nn.Linear(2, 2)),
    "a value that becomes a tensor": lambda s: s["values"].update(epoch=torch.ones(1)),
    "a value that becomes a module": lambda s: s["values"].update(epoch=nn.Linear(1, 1)),
    "a value that becomes an optimizer": lambda s: s["values"].update(
        list=[torch.optim.SGD(s["model"].spare.parameters(), momentum=0.1)]
    ),
    "a tensor in a value": lambda s: s["values"]["list"].__setitem__(1, torch.arange(4.0)),
    "two tensors in a value": lambda s: s["values"]["list"].append(torch.ones(2)),
    "an array": lambda s: s["values"].update(array=np.arange(4) + 1),
    "an array of another dtype": lambda s: s["values"].update(array=np.arange(4.0)),
    "another name of a dict": rename_key,
    "another order": reorder,
    "a tensor that states its boxes": with_geometry,
}
"""Changes after which a save must find the tensors anew."""

HARMLESS: dict[str, Change] = {
    "nothing": lambda s: None,
    "values in place": train,
    "a step": lambda s: step(s["optimizer"]),
    "a hyperparameter more": of_optimizer(lambda o: o.param_groups[0].update(more=1)),
    "a learning rate": of_optimizer(lambda o: o.param_groups[0].update(lr=0.123)),
    "a step of the scheduler": lambda s: s["scheduler"].step(),
    "a plain value": lambda s: s["values"].update(epoch=17),
    "gradients": of_optimizer(lambda o: o.zero_grad()),
    "evaluation": of_model(lambda m: m.eval()),
    "new dicts": lambda s: s.update(ema={**s["ema"]}, values={**s["values"]}),
    "a tensor object of the same memory": ema("a", lambda s: s["ema"]["a"].detach()),
    "a tensor in a value, in place": lambda s: s["values"]["list"][1].add_(1),
}
"""Changes after which a save knows the tensors."""


class Renamed(Net):
    prefix = ""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield self.prefix + name, parameter


class Hidden(Net):
    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return (pair for pair in super().named_modules(*args, **kwargs) if pair[0] != "hidden")


def become(cls: type, **attributes: object) -> Change:
    def change(state: State) -> None:
        state["model"].__class__ = cls
        for key, value in attributes.items():
            setattr(state["model"], key, value)

    return change


UNUSUAL: dict[str, tuple[Change, Change]] = {
    "shared state with tensors": (
        of_optimizer(lambda o: o.state.update(k={"t": torch.ones(3)})),
        of_optimizer(lambda o: o.state["k"]["t"].add_(1)),
    ),
    "a plain value in a moment": (
        moment("count", lambda s: 5),
        moment("count", lambda s: 6),
    ),
    "keys that are not text": (
        lambda s: moments(s).update({1: torch.ones(2)}),
        lambda s: moments(s).__setitem__(True, moments(s).pop(1)),
    ),
    "a number among buffers": (
        of_model(lambda m: m._buffers.update(number=5)),
        of_model(lambda m: m._buffers.update(number=6)),
    ),
    "overridden names of parameters": (
        become(Renamed),
        of_model(lambda m: setattr(m, "prefix", "x")),
    ),
    "a hidden module": (
        become(Hidden, hidden=nn.Module()),
        of_model(lambda m: m.hidden.register_parameter("p", nn.Parameter(torch.ones(3)))),
    ),
    "a tensor as learning rate": (
        of_optimizer(lambda o: o.param_groups[0].update(lr=torch.tensor(0.5))),
        of_optimizer(lambda o: o.param_groups[0]["lr"].fill_(0.25)),
    ),
    "a class of a wrapper": (
        of_model(lambda m: m.add_module("wrapped", Plain())),
        of_model(lambda m: setattr(m.wrapped, "__class__", ActivationWrapper)),
    ),
    "a class of an optimizer in a list": (
        lambda s: (
            [group.update(step=3) for group in s["optimizer"].param_groups],
            s.update(optimizer=[s["optimizer"]]),
        ),
        lambda s: setattr(s["optimizer"][0], "__class__", FusedAdam),
    ),
    "the same lists of names": (
        lambda s: s["model"].head._parameters.pop("bias"),
        same_lists,
    ),
    "the same lists of moments": (
        lambda s: moments(s).update(last=torch.ones(1)),
        same_lists_of_moments,
    ),
    "the state of another parameter": (add_group, state_of_another),
    "two shapes of one memory": (
        lambda s: s.update(views=(lambda a: {"a": a, "b": a.view(3, 2), "c": a})(torch.ones(2, 3))),
        lambda s: s["views"].update(c=s["views"]["b"]),
    ),
    "values that share memory with a weight": (
        lambda s: s["values"].update(part=s["model"].mask[1]),
        lambda s: s["values"].update(part=s["model"].mask[2]),
    ),
}
"""What a state has from the beginning, and a change of it."""


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_from_the_beginning(name: str, saver: Saver) -> None:
    state = make_state()
    before, change = UNUSUAL[name]
    with torch.no_grad():
        before(state)
        for _ in range(2):
            saver.save(state)
        change(state)
    saver.save(state)
    train(state)
    saver.save(state)


def test_a_storage_that_was_freed_and_is_smaller_at_the_same_address(saver: Saver) -> None:
    for _ in range(40):  # until the allocator returns the memory that was just freed
        state = {f"tensor{i}": torch.randn(256) for i in range(8)}
        tensor = state["tensor3"]
        for _ in range(2):
            saver.save(state)
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        storage.resize_(0)
        storage.resize_(512)
        with pytest.raises(sw.StateError, match="storage was freed"):
            saver.save(state)
        if tensor.data_ptr() == address:
            return
    pytest.skip("the allocator returned other memory")


@pytest.mark.parametrize("method", ["state_dict", "_save_to_state_dict", "named_parameters"])
def test_a_method_of_all_modules(
    method: str, saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    for _ in range(2):
        saver.save(state)
    plain = getattr(nn.Module, method)
    monkeypatch.setattr(nn.Module, method, lambda *args, **kwargs: plain(*args, **kwargs))
    assert saver.save(state)


def test_a_package_that_binds_values_is_imported_later(
    saver: Saver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.trainable(nn.Linear(1, 1))  # imports the module that binds it
    state, name = make_state(), "shardwise.parts.frameworks.trainable"
    module = sys.modules[name]
    monkeypatch.delitem(sys.modules, name)
    for _ in range(2):
        saver.save(state)
    monkeypatch.setitem(sys.modules, name, module)
    assert saver.save(state)


class Counted:
    """A value whose `state_dict` returns other tensors each time."""

    def __init__(self) -> None:
        self.calls = 0

    def state_dict(self) -> State:
        self.calls += 1
        return {"tensor": torch.full((3,), 2.0), "number": 1}

    def load_state_dict(self, state: State) -> None:
        pass


def test_a_save_reads_each_value_once(saver: Saver) -> None:
    """`state_dict` may take long, or may be a collective."""
    state = {**make_state(), "counted": Counted()}
    for number in range(4):
        if number == 2:
            state["new"] = torch.ones(1)
        before = state["counted"].calls
        saver.save(state)
        assert state["counted"].calls == before + 2  # `sw.save` has read it, too


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_found_anew(name: str, saver: Saver) -> None:
    state = make_state()
    saver.save(state)
    assert not saver.save(state)
    with torch.no_grad():
        CHANGES[name](state)
    assert saver.save(state), "the change was not noticed"
    train(state) if "ema" in state and isinstance(state["ema"], dict) else None
    saver.save(state)
    saver.save(state)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_has_not_changed_is_known(name: str, saver: Saver) -> None:
    state = make_state()
    saver.save(state)
    for _ in range(3):
        with torch.no_grad():
            HARMLESS[name](state)
        assert not saver.save(state)


def test_a_new_dict_of_the_same_tensors_is_known(saver: Saver) -> None:
    model = Net()
    saver.save({"model": model.state_dict(), "step": 1})
    for _ in range(3):
        with torch.no_grad():
            model.embed.weight.add_(1)
        assert not saver.save({"model": model.state_dict(), "step": 1})


def test_two_states_take_turns(saver: Saver) -> None:
    states = make_state(), make_state()
    for _ in range(3):
        for state in states:
            train(state)
            saver.save(state)


def fuzz(saver: Saver, seed: int, saves: int) -> int:
    """Apply random changes between saves, and return how many saves knew the tensors."""
    rng = random.Random(seed)
    state, known, unknown = make_state(), 0, 0
    for _ in range(saves):
        if unknown == 4:  # it has something now that is always found anew
            state, unknown = make_state(), 0
        for _ in range(rng.choice([0, 1, 1, 2])):
            changes = HARMLESS if rng.random() < 0.6 else CHANGES
            try:
                with torch.no_grad():
                    changes[rng.choice([*changes])](state)
            except (AttributeError, KeyError, IndexError, ValueError, TypeError, RuntimeError):
                pass  # an earlier change has removed what this one would change
        try:
            why = saver.save(state)
            known, unknown = known + (not why), unknown + 1 if why else 0
        except sw.ShardwiseError:  # nor can `sw.save` save it
            with pytest.raises(sw.ShardwiseError):
                sw.save(saver.root / "refused", state)
            state = make_state()
    return known


@pytest.mark.parametrize("seed", mostly_long(range(6), [0, 1, 2]))
def test_random_changes(seed: int, saver: Saver) -> None:
    assert fuzz(saver, seed, 12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 160))
def test_many_random_changes(seed: int, saver: Saver) -> None:
    assert fuzz(saver, seed, 40)


def test_nothing_is_kept_alive(saver: Saver) -> None:
    state = make_state()
    for _ in range(2):
        saver.save(state)
    model, optimizer = weakref.ref(state["model"]), weakref.ref(state["optimizer"])
    storage = state["ema"]["a"].untyped_storage()
    tensor = weakref.ref(state["ema"]["a"])
    address = storage.data_ptr()
    assert address
    del state, storage
    gc.collect()
    assert model() is None
    assert optimizer() is None
    assert tensor() is None


def test_memory_that_a_parameter_gave_up_is_free(saver: Saver) -> None:
    state = make_state()
    for _ in range(2):
        saver.save(state)
    storage = weakref.ref(first(state).untyped_storage())
    first(state).data = torch.zeros(4, 4)
    gc.collect()
    assert storage() is None
