"""One tensor under two names in the target, and two tensors in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import shardwise as sw


class Twice:
    """A fresh object has one tensor under several names; a used one has different tensors."""

    def __init__(self, used: bool) -> None:
        one = torch.zeros(3)
        self.values: dict[str, Any] = {"a": one, "b": [one, {"c": one[:2]}], "d": one.view(3, 1)}
        if used:
            self.values = {
                "a": torch.ones(3),
                "b": [torch.full((3,), 2.0), {"c": torch.full((2,), 3.0)}],
                "d": torch.full((3, 1), 4.0),
            }

    def state_dict(self) -> Any:
        return self.values

    def load_state_dict(self, state: Any) -> None:
        self.values = state


def test_different_tensors_of_the_checkpoint_come_back(tmp_path: Path) -> None:
    used, fresh = Twice(used=True), Twice(used=False)
    sw.save(tmp_path, {"object": used, "value": [*used.values.values()]})
    state: dict[str, Any] = {"object": fresh, "value": [*fresh.values.values()]}
    sw.load(tmp_path, {"object": fresh})
    assert repr(fresh.values) == repr(used.values)
    sw.load(tmp_path, state)
    assert repr(state["value"]) == repr([*used.values.values()])


def test_a_tie_of_the_checkpoint_stays_one(tmp_path: Path) -> None:
    saved, target = Twice(used=False), Twice(used=False)
    saved.values["a"].add_(5)
    memory = target.values["a"]
    sw.save(tmp_path, {"object": saved})
    sw.load(tmp_path, {"object": target})
    assert repr(target.values) == repr(saved.values)
    assert target.values["a"] is memory
    assert target.values["b"][0] is memory


def run() -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    optimizer = optim.SGD(module.parameters(), lr=torch.tensor(0.1))
    schedule = schedules.SequentialLR(
        optimizer,
        [
            schedules.LinearLR(optimizer, 0.1, total_iters=3),
            schedules.ExponentialLR(optimizer, 0.9),
        ],
        [3],
    )
    return {"model": module, "optimizer": optimizer, "schedule": schedule}, module


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 6])
@pytest.mark.parametrize("steps_before", [0, 1, 5])
def test_sequential_schedules_with_a_tensor_as_rate(
    tmp_path: Path, steps: int, steps_before: int
) -> None:
    def go_on(state: dict[str, Any], count: int) -> list[float]:
        rates = []
        for _ in range(count):
            state["optimizer"].step()
            state["schedule"].step()
            rates.append(float(state["optimizer"].param_groups[0]["lr"]))
        return rates

    (first, _), (second, _) = run(), run()
    go_on(first, steps)
    sw.save(tmp_path, first)
    go_on(second, steps_before)
    sw.load(tmp_path, second)
    assert go_on(second, 5) == go_on(first, 5)


def test_ties_that_the_checkpoint_lacks_are_refused_before_a_write(tmp_path: Path) -> None:
    def make(tied: bool) -> Any:
        module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        if tied:
            module[1].weight = module[0].weight
        return module

    saved, target = make(tied=False), make(tied=True)
    sw.save(tmp_path, {"a": saved, "z": torch.ones(2)})
    before = [each.clone() for each in target.parameters()]
    other = torch.zeros(2)
    with pytest.raises(
        sw.MismatchError, match=r"(?s)nothing was written.*a\.0\.weight and a\.1\.w"
    ):
        sw.load(tmp_path, {"a": target, "z": other})
    for a, b in zip(before, target.parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.tolist() == [0, 0]
    with torch.no_grad():
        saved[1].weight.copy_(saved[0].weight)
    sw.save(tmp_path / "equal", {"a": saved, "z": torch.ones(2)})
    sw.load(tmp_path / "equal", {"a": target, "z": other})
    assert torch.equal(target[1].weight, saved[0].weight)
