"""Legacy checkpoints of Megatron-LM, against what Megatron-Core had."""

from __future__ import annotations

import pytest
import torch

from shardwise.formats.recognise import read_foreign
from shardwise.formats.tree import Tree
from shardwise.formats.validate import checked
from tests.formats.comparing import assert_same
from tests.formats.conftest import LEGACY, Checkpoints
from tests.formats.reference import read_tensors


def wanted(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the checkpoint is to have, by our names, of what the ranks had."""
    found = {}
    for full, tensor in expected.items():
        name, key = full.split("|")
        if key == "weight":
            trained = expected.get(f"{name}|param", tensor).dtype == tensor.dtype
            found[f"{'model' if trained else 'module'}.{name}"] = tensor
        elif key == "param":
            found[f"model.{name}"] = tensor
        else:
            found[f"optimizer.{name}.{key}"] = tensor
    return found


@pytest.mark.parametrize("case", LEGACY)
def test_all_that_the_ranks_had_is_there(megatron: Checkpoints, case: str) -> None:
    tree = Tree(megatron.place(case, 4))
    foreign = checked(read_foreign(tree))
    assert (foreign.format, foreign.step) == ("legacy Megatron-LM", 2)
    read = read_tensors(tree.path, foreign)
    expected = wanted(megatron.expected(case, 4))
    for name, tensor in expected.items():
        assert_same(read[name], tensor)
    rest = [name for name in read if name not in expected]
    assert all(name.startswith("rng_state.") for name in rest), rest
