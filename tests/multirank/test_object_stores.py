"""Checkpoints in an object store: saved and loaded on one and two ranks, byte for byte."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.store.servers import Server, moto  # noqa: F401 - a fixture
from tests.tools.gang import Gang

BLOCK = 1 << 16
PART = 5 << 20  # the smallest that S3 allows
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PART - 1, PART, PART + 1, 2 * PART + 3)


def state_of(sizes: tuple[int, ...], *, empty: bool = False) -> dict[str, torch.Tensor]:
    """Return a tensor of random bytes for each size, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"t{size}": torch.zeros(size, dtype=torch.uint8)
        if empty
        else torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        for size in sizes
    }


def differences(url: str, sizes: tuple[int, ...]) -> list[str]:
    """Load a checkpoint, and return the names of the tensors that differ from those saved."""
    target = state_of(sizes, empty=True)
    sw.load(url, target)
    return [name for name, data in state_of(sizes).items() if not torch.equal(target[name], data)]


@pytest.mark.parametrize(
    "sizes",
    [(), SIZES, *(pytest.param((each,), marks=pytest.mark.long) for each in (0, 1, BLOCK))],
)
def test_what_one_rank_saves_it_loads_and_opens(
    moto: Server,  # noqa: F811
    sizes: tuple[int, ...],
) -> None:
    url = moto.new_url(part_mib="5")
    report = sw.save(url, state_of(sizes), step=7)
    assert report.path == url
    assert differences(url, sizes) == []
    checkpoint = sw.open(url)
    assert checkpoint.step == 7
    for name, data in state_of(sizes).items():
        assert torch.equal(checkpoint[name][...], data)
        assert torch.equal(checkpoint[name][1 : BLOCK + 1], data[1 : BLOCK + 1])
    assert moto.unfinished_uploads(url) == []


def test_a_checkpoint_is_replaced_only_with_overwrite(moto: Server) -> None:  # noqa: F811
    url = moto.new_url()
    sw.save(url, {"a": torch.ones(3)})
    with pytest.raises(sw.CheckpointExistsError):
        sw.save(url, {"a": torch.zeros(3)})
    sw.save(url, {"a": torch.full((3,), 2.0)}, overwrite=True)
    target = {"a": torch.zeros(3)}
    sw.load(url, target)
    assert target["a"].tolist() == [2.0] * 3
    data_files = [key for key in moto.keys(url) if key.endswith(".safetensors")]
    assert len(data_files) == 1
    assert sorted(moto.keys(url)) == sorted(["manifest.json", *data_files])


def test_a_save_into_the_root_of_a_run_writes_nothing(moto: Server) -> None:  # noqa: F811
    url = moto.new_url()
    with sw.Checkpointer(url, memory=None) as checkpointer:
        checkpointer.save(3, {"a": torch.ones(3)})
    before = moto.keys(url)
    with pytest.raises(sw.CheckpointExistsError, match=r"is the root of a run.*step-00000003"):
        sw.save(url, {"a": torch.zeros(3)}, overwrite=True)
    assert moto.keys(url) == before


def save_on_each_rank(url: str, sizes: tuple[int, ...]) -> list[str]:
    sw.save(url, state_of(sizes))
    return differences(url, sizes)


def test_two_ranks_divide_the_files(gang: Gang, moto: Server) -> None:  # noqa: F811
    url = moto.new_url(part_mib="5")
    assert gang.run(save_on_each_rank, url, SIZES, world=2) == [[], []]
    assert len([key for key in moto.keys(url) if key.endswith(".safetensors")]) == 2
    assert differences(url, SIZES) == []
    assert moto.unfinished_uploads(url) == []


def save_at_once(url: str) -> str:
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    try:
        sw.save(url, {"writer": torch.full((10,), dist.get_rank())}, group=group)
    except sw.CheckpointExistsError:
        return "refused"
    return "saved"


def test_of_jobs_that_save_one_step_at_once_one_wins(gang: Gang, moto: Server) -> None:  # noqa: F811
    url = moto.new_url()
    outcomes = gang.run(save_at_once, url, world=2)
    assert sorted(outcomes) == ["refused", "saved"]
    target = {"writer": torch.zeros(10, dtype=torch.int64)}
    sw.load(url, target)
    assert target["writer"].tolist() == [outcomes.index("saved")] * 10
