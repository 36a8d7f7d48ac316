"""What an error suggests where names differ by wrappers: it helps, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.stateful import Stateful

import shardwise as sw

Named = dict[str, torch.Tensor]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that was trained for a step, and its optimizer."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def below(prefix: str) -> Callable[[nn.Module], Named]:
    return lambda model: {f"{prefix}{name}": t for name, t in model.state_dict().items()}


def compiled_within(model: nn.Module) -> Named:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(model[0], model[1], torch.compile(model[2])).state_dict()


@pytest.mark.parametrize(
    ("key", "named", "optimized"),
    [
        ("model", below("module."), True),  # as DistributedDataParallel
        ("model", lambda model: torch.compile(model).state_dict(), True),
        ("model", compiled_within, True),
        ("model", below("_orig_mod.module."), False),
        ("state_dict", below("network."), False),  # as Lightning's modules
        ("net", below(""), False),
    ],
)
def test_what_is_suggested_helps(
    tmp_path: Path, key: str, named: Callable[[nn.Module], Named], optimized: bool
) -> None:
    model, optimizer = made()
    saved = {key: named(model), **({"optimizer": optimizer.state_dict()} if optimized else {})}
    torch.save(saved, tmp_path / "saved.pt")
    other, its_optimizer = made()
    state: dict[str, Any] = {"model": other, **({"optimizer": its_optimizer} if optimized else {})}
    for tensor in other.state_dict().values():
        tensor.zero_()
    with pytest.raises(sw.MismatchError, match="would find all that is missing") as caught:
        sw.load(tmp_path / "saved.pt", state)
    suggested = caught.value.summary.partition("nothing was written. ")[2].partition(" would ")[0]
    sw.load(tmp_path / "saved.pt", state, **eval(f"dict({suggested})", {"sw": sw}))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        if optimized:
            moments = optimizer.state[one]["exp_avg"], its_optimizer.state[another]["exp_avg"]
            assert torch.equal(*moments)


def test_one_that_is_bare_fits_a_wrapped_module(tmp_path: Path) -> None:
    model, _ = made()
    sw.save(tmp_path / "bare", {"model": model})
    holder = nn.Module()
    holder.network = model
    with pytest.raises(sw.MismatchError, match=r"rename=\{'model.network': 'model'\} would find"):
        sw.load(tmp_path / "bare", {"model": holder})
    sw.load(tmp_path / "bare", {"model": holder}, rename={"model.network": "model"})


def said_of(tmp_path: Path, saved: list[str], wanted: list[str], **options: Any) -> str:
    """The error of a load of these names from a checkpoint with others."""
    sw.save(tmp_path / "names", {name: torch.zeros(1) for name in saved})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path / "names", nested(wanted), **options)
    return caught.value.summary


def nested(names: list[str]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name in names:
        key, _, rest = name.partition(".")
        state.setdefault(key, {})[rest] = torch.zeros(1)
    return {key: each.get("", each) for key, each in state.items()}


@pytest.mark.parametrize(
    ("missing", "saved"),
    [
        (["model.w", "model.b"], ["net.w", "other.b"]),  # half of the key each
        (["model.w"], ["unrelated"]),
    ],
)
def test_nothing_is_suggested_that_does_not_find_most_of_a_key(
    tmp_path: Path, missing: list[str], saved: list[str]
) -> None:
    assert "would find" not in said_of(tmp_path, saved, missing)


def test_of_several_that_fit_it_is_the_one_below_the_same_key(tmp_path: Path) -> None:
    saved = ["ema.w", "ema.b", "model.module.w", "model.module.b"]
    said = said_of(tmp_path, saved, ["model.w", "model.b"])
    assert "rename={'model': 'model.module'} would find all that is missing" in said


def test_names_that_nothing_explains_do_not_hide_what_would_find_the_others(
    tmp_path: Path,
) -> None:
    missing = ["model.w", "model.b", "model.c", "model.new", "epoch"]
    said = said_of(tmp_path, ["net.w", "net.b", "net.c"], missing)
    assert "rename={'model': 'net'} would find 3 of the 5 missing names" in said
    wrapped = [f"model.{i}.module.w" for i in range(3)]
    missing = [*(f"model.{i}.w" for i in range(3)), "epoch"]
    said = said_of(tmp_path / "wrapped", wrapped, missing)
    assert "would find 3 of the 4 missing names" in said
    assert "*.module.* -> *.*" in said


def test_what_fills_something_already_is_never_suggested(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Linear(2, 2)})
    sw.save(tmp_path / "c", {"model": model})
    model["head"] = nn.Linear(2, 2)
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path / "c", {"model": model})
    assert "rename={" not in caught.value.summary


class AppState(Stateful):
    """As in the tutorial of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("it is not reached")


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """A checkpoint as the tutorial of torch.distributed.checkpoint writes it."""
    dcp.save({"app": AppState(*made())}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp"


def test_a_new_key_does_not_hide_what_the_tutorial_of_dcp_calls_the_others(tutorial: Path) -> None:
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer, "epoch": 0}
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tutorial, state)
    rename = {"model": "app.model", "optimizer": "app.optim"}
    assert f"rename={rename} would find 5 of the 6 missing names" in caught.value.summary
    assert sw.load(tutorial, state, rename=rename, strict=False).missing == ("epoch",)
    assert sw.load(tutorial, {"app": {"model": model, "optim": optimizer}}).missing == ()


def test_a_stateful_whose_parts_have_names_there_is_to_be_opened_up(tutorial: Path) -> None:
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tutorial, {"app": AppState(*made())})
    assert '{"app": {"model": …, "optim": …}}' in caught.value.summary


def test_a_rename_that_reaches_no_group_of_an_optimizer_leads_to_a_specification(
    tmp_path: Path,
) -> None:
    model, optimizer = made()
    sw.save(tmp_path / "c", {"model": nn.ModuleDict({"net": model}), "optimizer": optimizer})
    other, its_optimizer = made()
    state = {"model": other, "optimizer": its_optimizer}
    rename = {"model": "model.net"}
    with pytest.raises(sw.MismatchError, match="does not rename an optimizer") as caught:
        sw.load(tmp_path / "c", state, rename=rename)
    (said,) = [each for each in caught.value.problems if "sw.spec(" in each]
    spec = eval(said[said.index("sw.spec(") :], {"sw": sw})
    assert sw.load(tmp_path / "c", state, rename=rename, spec=spec).missing == ()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)
        assert torch.equal(optimizer.state[one]["exp_avg"], its_optimizer.state[another]["exp_avg"])


def test_the_key_of_a_bare_state_dict_is_suggested(tmp_path: Path) -> None:
    """A file of torch.save with a bare state dict has names below "model"."""
    model, _ = made()
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    with pytest.raises(sw.MismatchError, match=r'\{"model": …\} as the state would find all'):
        sw.load(tmp_path / "saved.pt", model.state_dict())
    sw.load(tmp_path / "saved.pt", {"model": model.state_dict()})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path / "saved.pt", {**model.state_dict(), "other": torch.ones(1)})
    assert "as the state" not in caught.value.summary


def layers(count: int, size: int = 4) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size) for _ in range(count)))


def said_of_modules(
    path: Path, saved: dict[str, Any], state: dict[str, Any], **options: Any
) -> str:
    sw.save(path, saved)
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(path, state, **options)
    return caught.value.summary


def test_a_rename_that_hides_what_is_there_is_to_be_left_out(tmp_path: Path) -> None:
    saved, state = {"model": layers(3)}, {"model": layers(1)}
    said = said_of_modules(tmp_path / "c", saved, state, rename={"model": "modl"})
    assert "without rename=, all that is missing would be found; " in said
    assert "rename={" not in said
    assert sw.load(tmp_path / "c", state, strict=False).missing == ()


def test_that_is_not_said_of_names_with_other_shapes(tmp_path: Path) -> None:
    saved, state = {"model": layers(1)}, {"model": layers(1, 5)}
    said = said_of_modules(tmp_path / "c", saved, state, rename={"model": "modl"})
    assert "would" not in said


@pytest.mark.parametrize("wrapper", ["net", "model.module", "model._orig_mod"])
def test_what_has_another_shape_is_never_suggested(tmp_path: Path, wrapper: str) -> None:
    tensors = {f"{wrapper}.{name}": t for name, t in layers(1).state_dict().items()}
    torch.save(tensors, tmp_path / "saved.pt")
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path / "saved.pt", {"model": layers(1, 5)})
    assert "would find" not in caught.value.summary


def test_a_key_whose_tensors_have_another_shape_is_not_suggested(tmp_path: Path) -> None:
    torch.save(layers(1).state_dict(), tmp_path / "saved.pt")
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path / "saved.pt", layers(1, 5).state_dict())
    assert "would find" not in caught.value.summary


def test_no_layer_is_suggested_for_another_where_several_fit(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"a": layers(1), "b": layers(1)})
    said = said_of_modules(tmp_path / "c", {"model": saved}, {"net": layers(1)})
    assert "rename={'net': 'model." not in said
