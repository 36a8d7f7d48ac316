"""`sw.trainable` keeps what was trained or changed earlier, though it is frozen now."""

from __future__ import annotations

import importlib.util
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="PEFT is not installed: pip install '.[frameworks]'",
)
LAYERS = ("embed", "first", "second", "third")


def make() -> Any:
    """A base; every call returns the same values. All of it is frozen."""
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(64, 8), **{name: nn.Linear(8, 8) for name in LAYERS[1:]}}
    return nn.ModuleDict(layers).requires_grad_(False)


def train(model: Any, *names: str, optimizer: str = "AdamW") -> torch.optim.Optimizer:
    """Train some layers for two steps, and freeze them again."""
    model.requires_grad_(False)
    for name in names:
        model[name].requires_grad_(True)
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer_class: Any = getattr(torch.optim, optimizer)
    made: torch.optim.Optimizer = optimizer_class(parameters, lr=0.1)
    for step in range(2):
        value = model["embed"](torch.tensor([step]))
        for name in LAYERS[1:]:
            value = model[name](value)
        value.square().mean().backward()
        made.step()
        made.zero_grad()
    return made


def stored(place: Path) -> set[str]:
    names = [name for name in sw.open(place).tensors() if name.startswith("model.")]
    return {name.split(".")[1] for name in names}


def assert_restores(place: Path, model: nn.Module, fresh: nn.Module) -> None:
    """Compare all bytes of a model with those that a load puts into a new base."""
    sw.load(place, {"model": sw.trainable(fresh)})
    expected, found = model.state_dict(), fresh.state_dict()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize("reuse", [True, False], ids=["one-wrapper", "new-wrappers"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_what_was_trained_and_is_frozen_is_kept(
    tmp_path: Path, reuse: bool, optimizer: str
) -> None:
    model = make()
    wrapped = sw.trainable(model)
    for index, name in enumerate(LAYERS):
        train(model, name, optimizer=optimizer)
        state = {"model": wrapped if reuse else sw.trainable(model)}
        sw.save(tmp_path / name, state)
        assert stored(tmp_path / name) == {*LAYERS[: index + 1]}
        assert_restores(tmp_path / name, model, make())


def test_what_was_trained_between_two_saves_is_kept(tmp_path: Path) -> None:
    """Nothing looked at the model while it was trained. Few rows of the embedding changed."""
    model = make()
    sw.save(tmp_path / "before", {"model": sw.trainable(model)})
    train(model, "embed", "first")
    train(model, "second")
    sw.save(tmp_path / "after", {"model": sw.trainable(model)})
    assert stored(tmp_path / "after") == {"embed", "first", "second"}
    assert_restores(tmp_path / "after", model, make())


def test_what_an_optimizer_of_the_state_has_stepped_is_kept(tmp_path: Path) -> None:
    model = make()
    first, second = train(model, "first"), train(model, "second")
    model.requires_grad_(False)
    state = {"model": sw.trainable(model), "optimizers": {"a": first, "b": second}}
    sw.save(tmp_path, state)
    assert stored(tmp_path) == {"first", "second"}


@pytest.mark.parametrize("then", ["compile", "deepcopy", "wrap", "data-parallel", "rename"])
def test_the_memory_follows_the_model(tmp_path: Path, then: str) -> None:
    model = make()
    train(model, "first")
    sw.trainable(model)
    train(model, "second")
    changed: dict[str, Any] = {
        "compile": torch.compile,
        "deepcopy": deepcopy,
        "wrap": lambda each: nn.Sequential(each),
        "data-parallel": nn.DataParallel,
        "rename": lambda each: nn.ModuleDict({"inner": each}),
    }
    other, fresh = changed[then](model), changed[then](make())
    sw.save(tmp_path, {"model": sw.trainable(other)})
    names = {name.split(".")[-2] for name in sw.open(tmp_path).tensors()}
    assert names == {"first", "second"}
    assert_restores(tmp_path, other, fresh)


def test_what_a_load_filled_is_kept_in_a_resumed_run(tmp_path: Path) -> None:
    """The resumed process has never seen the first layer trained. One checkpoint is kept."""
    model, resumed = make(), make()
    train(model, "first")
    keep = sw.Keep(last=1)
    with sw.Checkpointer(tmp_path, memory=None, keep=keep) as checkpointer:
        checkpointer.save(1, {"model": sw.trainable(model)})
    for step, name in enumerate(["second", "third"], 2):
        resumed = make()
        with sw.Checkpointer(tmp_path, memory=None, keep=keep) as checkpointer:
            assert checkpointer.restore({"model": sw.trainable(resumed)}) == step - 1
            train(model, name)
            train(resumed, name)
            checkpointer.save(step, {"model": sw.trainable(resumed)})
    assert_restores(tmp_path, model, make())
    assert stored(tmp_path) == {"first", "second", "third"}


def test_a_checkpoint_of_everything_stays_everything(tmp_path: Path) -> None:
    model, resumed = make(), make()
    train(model, "first", "second")
    model.requires_grad_(True)
    sw.save(tmp_path / "whole", {"model": sw.trainable(model)})
    resumed["third"].requires_grad_(True)
    sw.load(tmp_path / "whole", {"model": sw.trainable(resumed)})
    sw.save(tmp_path / "next", {"model": sw.trainable(resumed)})
    assert_restores(tmp_path / "next", model, make())


def test_only_what_a_load_selects_is_kept(tmp_path: Path) -> None:
    model, other = make(), make()
    train(model, "first", "second")
    sw.save(tmp_path / "a", {"model": sw.trainable(model)})
    sw.load(tmp_path / "a", {"model": sw.trainable(other)}, only=["model.first.*"])
    sw.save(tmp_path / "b", {"model": sw.trainable(other)})
    assert stored(tmp_path / "b") == {"first"}


def test_a_refused_load_keeps_nothing(tmp_path: Path) -> None:
    model, other = make(), make()
    train(model, "first")
    sw.save(tmp_path / "a", {"model": sw.trainable(model)})
    with torch.no_grad():
        other["second"].weight.fill_(1)
    with pytest.raises(sw.MismatchError, match=r"model\.second\.weight: frozen, other values"):
        sw.load(tmp_path / "a", {"model": sw.trainable(other)})
    sw.save(tmp_path / "b", {"model": sw.trainable(other)})
    assert stored(tmp_path / "b") == set()


def test_an_earlier_checkpoint_is_not_taken_for_a_later_state(tmp_path: Path) -> None:
    """The checkpoint lacks what was trained since; the base is no longer in the model."""
    model = make()
    train(model, "first")
    sw.save(tmp_path, {"model": sw.trainable(model)})
    train(model, "second")
    model.requires_grad_(False)
    with pytest.raises(sw.MismatchError, match=r"model\.second\.weight: frozen, other values"):
        sw.load(tmp_path, {"model": sw.trainable(model)})


def test_tied_weights_are_kept_under_both_names(tmp_path: Path) -> None:
    def tied() -> Any:
        model = make()
        model["third"].weight = model["first"].weight
        return model

    model = tied()
    train(model, "third")
    sw.trainable(model)
    train(model, "second")
    sw.save(tmp_path, {"model": sw.trainable(model)})
    assert_restores(tmp_path, model, tied())


def test_values_that_change_out_of_sight_are_kept(tmp_path: Path) -> None:
    """Some libraries change the memory of a parameter without its knowledge, as PEFT's merges."""
    model = make()
    sw.save(tmp_path / "before", {"model": sw.trainable(model)})
    model["first"].weight.data.mul_(2)
    model["second"].weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
    sw.save(tmp_path / "after", {"model": sw.trainable(model)})
    names = set(sw.open(tmp_path / "after").tensors())
    assert names == {"model.first.weight", "model.second.weight"}
    assert_restores(tmp_path / "after", model, make())


def test_frozen_buffers_that_change_are_kept(tmp_path: Path) -> None:
    def with_buffer() -> Any:
        model = make()
        model.register_buffer("packed", torch.arange(8, dtype=torch.int32))
        return model

    model = with_buffer()
    sw.save(tmp_path / "a", {"model": sw.trainable(model, buffers=False)})
    assert stored(tmp_path / "a") == set()
    model.packed += 1
    sw.save(tmp_path / "b", {"model": sw.trainable(model, buffers=False)})
    assert stored(tmp_path / "b") == {"packed"}
    fresh = with_buffer()
    sw.load(tmp_path / "b", {"model": sw.trainable(fresh, buffers=False)})
    assert torch.equal(fresh.packed, model.packed)
    sw.save(tmp_path / "c", {"model": sw.trainable(fresh, buffers=False)})
    assert stored(tmp_path / "c") == {"packed"}


def test_a_base_that_nobody_changes_is_never_saved(tmp_path: Path) -> None:
    """Moves, forward passes, saves and loads do not count as changes."""
    model = make()
    model["third"].requires_grad_(True)
    place = tmp_path / "0"
    sw.save(place, {"model": sw.trainable(model)})
    for index in range(1, 3):
        sw.load(place, {"model": sw.trainable(model)})
        train(model, "third")
        model.to(torch.float64).to(torch.float32)
        model.eval().train()
        place = tmp_path / str(index)
        sw.save(place, {"model": sw.trainable(model)})
        assert stored(place) == {"third"}


def adapted(*adapters: str) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    config = LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"], init_lora_weights=False)
    model = get_peft_model(net, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    return model


@needs_peft
def test_all_adapters_of_peft_are_saved(tmp_path: Path) -> None:
    """Also those that were trained before the first save, and those that a resume freezes."""
    model = adapted("default", "b")
    for name, parameter in model.named_parameters():
        if ".default." in name or ".b." in name:
            nn.init.normal_(parameter)
    for active in ("b", "default"):
        model.set_adapter(active)
        sw.save(tmp_path / active, {"model": sw.trainable(model)})
        names = [*sw.open(tmp_path / active).tensors()]
        assert {name.split(".")[-2] for name in names} == {"default", "b"}
        assert len(names) == 8
        fresh = adapted("default", "b")
        sw.load(tmp_path / active, {"model": sw.trainable(fresh)})
        for name, value in model.state_dict().items():
            assert torch.equal(value, fresh.state_dict()[name]), name
