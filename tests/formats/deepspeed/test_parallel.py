"""DeepSpeed's pipelines and experts, against what the ranks had when they saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.formats.conftest import PARALLEL
from tests.formats.deepspeed.test_native import read, same, values_of
from tests.formats.reference import read_tensors

pytestmark = pytest.mark.timeout(400)


def expected(directory: Path, case: str) -> dict[str, torch.Tensor]:
    """What all ranks had, under the names of all; where several had the same, it was the same."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(4):
        for name, tensor in torch.load(directory / f"{case}.expected-{rank}.pt").items():
            full = re.sub(
                r"(deepspeed_experts)\.(\d)\.",
                lambda expert: f"{expert[1]}.{2 * (rank % 2) + int(expert[2])}.",  # noqa: B023
                name,
            )
            assert full not in found or same(found[full], tensor)
            found[full] = tensor
    return found


@pytest.mark.parametrize("case", PARALLEL)
def test_all_is_as_the_ranks_had_it(parallel: Path, case: str) -> None:
    place = parallel / case
    foreign = read(place)
    tensors = read_tensors(place, foreign)
    wanted = expected(parallel, case)
    assert len(wanted) == (63 if case.startswith("experts") else 15)
    assert [name for name, tensor in wanted.items() if not same(tensors[name], tensor)] == []
    beside = {name for name in tensors if not name.startswith("module.")} - set(wanted)
    assert {name.rsplit(".", 1)[1] for name in beside} == {"step"}
    assert foreign.world_size == 4


@pytest.mark.parametrize("case", [case for case in PARALLEL if "bfloat16" in case])
def test_the_module_has_weights_of_lower_precision(parallel: Path, case: str) -> None:
    place = parallel / case
    tensors = read_tensors(place, read(place))
    module = {name: tensor for name, tensor in tensors.items() if name.startswith("module.")}
    for name, tensor in module.items():
        # A pipeline's file of a tied layer does not say which of tied_modules it is.
        master = "tied_modules.embed.weight" if name == "module.0.weight" else name[7:]
        assert same(tensor, tensors[f"model.{master}"].bfloat16())
    assert len(module) == (21 if case.startswith("experts") else 5)


def test_each_kind_of_expert_keeps_its_group(parallel: Path) -> None:
    groups = values_of(parallel / "experts-zero1")["optimizer.param_groups"]
    assert [len(group["members"]) for group in groups] == [5, 16]
    assert [group["value"].get("moe", False) for group in groups] == [False, True]
