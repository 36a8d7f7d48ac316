"""A specification laid over global tensors, however these are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

GROUPS, QUERIES, DIM, HIDDEN = 3, 2, 4, 5
SPEC = """
let groups = 3
qkv.weight [(g (q + k + v) d) h] -> wq [(g q d) h], wk [(g k d) h], wv [(g v d) h]
    where g = groups, q = 2, k = 1, v = 1
up.weight [i o] -> up [o i]
norm -> norm [h]
optimizer.norm.moment -> optimizer.scale.moment [h]
head = up
"""


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tensors = {
        "qkv.weight": torch.randn(GROUPS * (QUERIES + 2) * DIM, HIDDEN),
        "up.weight": torch.randn(6, 7),
        "norm": torch.randn(9),
        "optimizer.norm.moment": torch.randn(9),
    }

    def job(group: ThreadGroup) -> None:
        state: dict[str, object] = {}
        for name, tensor in tensors.items():
            rows = tensor.shape[0]
            low, high = (rows * (group.rank + k) // group.size for k in (0, 1))
            box = sw.Box((low, *(0,) * (tensor.ndim - 1)), (high - low, *tensor.shape[1:]))
            state[name] = sw.Shards(
                tuple(tensor.shape), tensor.dtype, [(box, tensor[low:high].clone())]
            )
        sw.save(tmp_path / "saved", state, group=group)

    run_ranks(5, job)
    return tmp_path / "saved", tensors


def opened(place: Path, text: str = SPEC) -> sw.Checkpoint:
    return sw.open(place, spec=sw.spec(text))


def test_fused_and_transposed_tensors_are_read_from_shards(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    place, tensors = saved
    read = {name: tensor[...] for name, tensor in opened(place).tensors().items()}
    fused = tensors["qkv.weight"].reshape(GROUPS, QUERIES + 2, DIM, HIDDEN)
    expected = {
        "wq": fused[:, :2].reshape(-1, HIDDEN),
        "wk": fused[:, 2].reshape(-1, HIDDEN),
        "wv": fused[:, 3].reshape(-1, HIDDEN),
        "up": tensors["up.weight"].T,
        "head": tensors["up.weight"].T,
        "norm": tensors["norm"],
        "optimizer.scale.moment": tensors["optimizer.norm.moment"],
    }
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


def test_what_does_not_fit_is_listed(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    with pytest.raises(sw.MismatchError) as caught:
        opened(saved[0], "norm -> norm [h]\n")
    assert any("up.weight" in problem for problem in caught.value.problems)


def test_what_a_specification_declares_equal_is_compared(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    _, tensors = saved
    text = SPEC.replace("head = up", "head -> up [o i]")
    equal = {**tensors, "head": tensors["up.weight"].T.contiguous()}
    sw.save(tmp_path / "equal", dict(equal))
    checkpoint = opened(tmp_path / "equal", text)
    assert torch.equal(checkpoint["up"][...], tensors["up.weight"].T)  # type: ignore[index]
    checkpoint.verify()
    equal["head"][3, 2] += 1
    sw.save(tmp_path / "other", dict(equal))
    with pytest.raises(sw.MismatchError) as caught:
        opened(tmp_path / "other", text).verify()
    (problem,) = caught.value.problems
    assert "up: two copies differ, first at [3, 2]: " in problem
    assert ".safetensors at byte " in problem
