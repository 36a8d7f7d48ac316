"""`PerRankLoader`, with torchdata's own loader."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

import shardwise as sw
from shardwise.data import PerRankLoader
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch

stateful = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


class Numbers:
    """A map dataset."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(group: ThreadGroup, workers: int = 0) -> Any:
    sampler = DistributedSampler(Numbers(), group.size, group.rank)  # type: ignore[arg-type]
    return stateful.StatefulDataLoader(
        Numbers(), batch_size=3, sampler=sampler, num_workers=workers
    )


def save_after_two(group: ThreadGroup, path: Path, workers: int = 0) -> list[list[int]]:
    loader = loader_of(group, workers)
    batches = iter(loader)
    for _ in range(2):
        next(batches)
    state = {"data": PerRankLoader(loader, rank=group.rank, world_size=group.size)}
    sw.save(path, state, group=group)
    return [each.tolist() for each in batches]


def load_rest(group: ThreadGroup, path: Path, workers: int = 0) -> list[list[int]]:
    loader = loader_of(group, workers)
    state = {"data": PerRankLoader(loader, rank=group.rank, world_size=group.size)}
    sw.load(path, state, group=group)
    return [each.tolist() for each in loader]


def test_each_rank_continues_with_its_own_data(tmp_path: Path) -> None:
    rest = run_ranks(2, lambda group: save_after_two(group, tmp_path))
    assert rest[0] != rest[1]
    assert len(rest[0]) == 8
    assert run_ranks(2, lambda group: load_rest(group, tmp_path)) == rest


def test_a_loader_with_workers_continues(tmp_path: Path) -> None:
    (alone,) = ThreadGroup.of_size(1)  # no threads: they may hold locks while workers are forked
    rest = save_after_two(alone, tmp_path, 2)
    assert load_rest(alone, tmp_path, 2) == rest


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    def load(group: ThreadGroup) -> None:
        state = {"data": PerRankLoader(loader_of(group), rank=group.rank, world_size=group.size)}
        sw.load(tmp_path, state, group=group)

    run_ranks(2, lambda group: save_after_two(group, tmp_path))
    for outcome in run_ranks_and_catch(3, load):
        assert isinstance(outcome, sw.StateError)
        assert "data: StatefulDataLoader has one state for each rank" in str(outcome)
        assert "2 ranks have saved, and 3 load. Load with the same numbers, or" in str(outcome)


def test_other_groups_of_the_same_world_are_refused(tmp_path: Path) -> None:
    def load(group: ThreadGroup) -> None:
        state = {"data": PerRankLoader(loader_of(group), rank=0, world_size=1)}
        sw.load(tmp_path, state, group=group)

    run_ranks(2, lambda group: save_after_two(group, tmp_path))
    outcomes = run_ranks_and_catch(2, load)
    assert all(isinstance(outcome, sw.StateError) for outcome in outcomes)
    assert "world_size was 2 and is 1" in str(outcomes[0])
    assert "rank was 1 and is 0; world_size was 2 and is 1" in str(outcomes[1])


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    def load(group: ThreadGroup) -> None:
        state = {"data": PerRankLoader(loader_of(group, 3), rank=group.rank, world_size=group.size)}
        sw.load(tmp_path, state, group=group)

    run_ranks(1, lambda group: save_after_two(group, tmp_path))
    with pytest.raises(sw.StateError, match="num_workers was 0 and is 3"):
        run_ranks(1, load)


def test_the_state_may_be_left_out(tmp_path: Path) -> None:
    """As the errors advise."""
    run_ranks(2, lambda group: save_after_two(group, tmp_path))
    loader = loader_of(ThreadGroup.of_size(1)[0])
    state = {"data": PerRankLoader(loader, rank=0, world_size=1)}
    sw.load(tmp_path, state, skip=["data"])
    assert len(list(islice(loader, 100))) == 20
