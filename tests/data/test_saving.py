"""Loaders in a checkpoint: saved with the weights, and loaded under another number of ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.data import (
    BestFitPacker,
    ConcatPacker,
    ElasticBatchSampler,
    ElasticStreamDataset,
    ElasticStreamLoader,
)
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.data.labelled import count_tokens, label_sources, tokens_of
from tests.memory.test_snapshots import shm
from tests.tools.gang import Gang

__all__ = ["shm"]
SAVE_EVERY = 3
SAMPLES = 52


def make_dataset(**options: Any) -> ElasticStreamDataset:
    arguments: dict[str, Any] = {
        "sources": label_sources([2] * 20, [3] * 17),
        "streams": 16,
        "transform": tokens_of,
        "packer": partial(BestFitPacker, 12, sequences=4),
        **options,
    }
    return ElasticStreamDataset(**arguments)


def train_some(loader: ElasticStreamLoader, steps: int) -> list[torch.Tensor]:
    batches = []
    for batch in islice(loader, steps):
        loader.advance()
        batches.append(batch)
    return batches


def loader_of(
    rank: int, world: int, dataset: ElasticStreamDataset | None = None, **options: Any
) -> ElasticStreamLoader:
    return ElasticStreamLoader(dataset or make_dataset(), rank=rank, world_size=world, **options)


@pytest.mark.parametrize(("before", "after"), [(1, 16), (16, 1), (5, 3), (3, 7), (4, 4)])
def test_streams_move_with_their_buffers_to_another_number_of_ranks(
    tmp_path: Path, before: int, after: int
) -> None:
    whole = torch.stack(train_some(loader_of(0, 1), 9))

    def save(group: ThreadGroup) -> list[torch.Tensor]:
        loader = loader_of(group.rank, group.size)
        batches = train_some(loader, 5)
        sw.save(tmp_path / "a", {"loader": loader}, group=group)
        return batches

    def load(group: ThreadGroup) -> list[torch.Tensor]:
        loader = loader_of(group.rank, group.size)
        sw.load(tmp_path / "a", {"loader": loader}, group=group)
        return train_some(loader, 4)

    for world, function, expected in ((before, save, whole[:5]), (after, load, whole[5:])):
        parts = run_ranks(world, function)
        assert torch.equal(
            torch.stack([torch.cat(each) for each in zip(*parts, strict=True)]), expected
        )


def test_a_rank_reads_only_its_rows(tmp_path: Path) -> None:
    packer = partial(BestFitPacker, 4096, sequences=16)

    def loader_of_rank(group: ThreadGroup) -> ElasticStreamLoader:
        return loader_of(group.rank, group.size, make_dataset(packer=packer))

    def save(group: ThreadGroup) -> int:
        return sw.save(tmp_path, {"loader": loader_of_rank(group)}, group=group).bytes_written

    def load(group: ThreadGroup) -> int:
        return sw.load(tmp_path, {"loader": loader_of_rank(group)}, group=group).bytes_needed

    written = sum(run_ranks(2, save))
    assert max(run_ranks(8, load)) < written / 7


def test_ranks_may_form_other_groups_of_the_same_world(tmp_path: Path) -> None:
    """Four data-parallel ranks become two, each with two tensor-parallel ranks that read alike."""
    whole = torch.stack(train_some(loader_of(0, 1), 4))

    def save(group: ThreadGroup) -> None:
        loader = loader_of(group.rank, 4)
        train_some(loader, 2)
        sw.save(tmp_path, {"loader": loader}, group=group, check_replicas=True)

    def load(group: ThreadGroup) -> torch.Tensor:
        loader = loader_of(group.rank // 2, 2)
        sw.load(tmp_path, {"loader": loader}, group=group)
        sw.save(tmp_path / "again", {"loader": loader}, group=group, check_replicas=True)
        return torch.stack(train_some(loader, 2))

    run_ranks(4, save)
    parts = run_ranks(4, load)
    assert torch.equal(torch.cat([parts[0], parts[2]], dim=1), whole[2:])
    assert torch.equal(torch.cat([parts[1], parts[3]], dim=1), whole[2:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"streams": 8}, "streams was 16 and is 8"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"packer": partial(ConcatPacker, 12)}, "packer was 'best fit 12.*and is 'concat 12'"),
        ({"packer": None, "transform": None}, "packer was 'best fit 12.*and is None"),
        ({"sources": label_sources([2] * 20)}, "source 's1' is missing; keep it with weight 0"),
        ({"sources": label_sources([2] * 20, [3] * 18)}, "'s1' had 17 segments and has 18"),
    ],
)
def test_changed_streams_are_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    loader = loader_of(0, 1)
    train_some(loader, 2)
    sw.save(tmp_path, {"loader": loader})
    other = loader_of(0, 1, make_dataset(**changed))
    with pytest.raises(sw.StateError, match=f"loader: the streams have changed: .*{message}"):
        sw.load(tmp_path, {"loader": other})


def test_what_may_change(tmp_path: Path) -> None:
    """Weights, the global batch, and further sources; places stay."""
    first = loader_of(0, 1)
    train_some(first, 3)
    sw.save(tmp_path, {"loader": first})
    more = {**label_sources([2] * 20, [3] * 17), "more": label_sources([1] * 16)["s0"]}
    dataset = make_dataset(sources=more, weights={"s0": 1, "s1": 0, "more": 0})
    second = loader_of(0, 1, dataset, global_batch=32)
    sw.load(tmp_path, {"loader": second})
    before = first._states
    assert {n: each.places["s1"] for n, each in second._states.items()} == {
        n: each.places["s1"] for n, each in before.items()
    }
    train_some(second, 3)
    moved = [second._states[n].places["s0"] != before[n].places["s0"] for n in range(16)]
    stayed = [second._states[n].places["s1"] == before[n].places["s1"] for n in range(16)]
    assert all(moved)
    assert all(stayed)


def test_a_document_in_use_is_finished_when_the_weights_change() -> None:
    def loader_with(**weights: float) -> ElasticStreamLoader:
        sources = label_sources([9] * 16, [9] * 16)
        dataset = make_dataset(sources=sources, packer=partial(ConcatPacker, 4), weights=weights)
        return loader_of(0, 1, dataset, collate_fn=np.concatenate)

    first, second = loader_with(s0=1, s1=1), loader_with(s0=0, s1=1)
    before = np.concatenate(train_some(first, 3)).tolist()
    states = first._states.values()
    assert {each.source for each in states} == {"", "s0", "s1"}
    second.load_state_dict(first.state_dict())
    both = Counter([*before, *np.concatenate(train_some(second, 3)).tolist()])
    cut = [number for number in set(before) if before.count(number) < count_tokens(number)]
    assert len(cut) == sum(each.used_tokens > 0 for each in states)
    assert all(both[number] == count_tokens(number) for number in cut)


def test_ranks_that_advance_differently_cannot_save(tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> None:
        loader = loader_of(group.rank, group.size)
        train_some(loader, 2 + group.rank)
        sw.save(tmp_path, {"loader": loader}, group=group)

    with pytest.raises(sw.MismatchError, match=r"loader\.batches"):
        run_ranks(2, save)


def test_a_snapshot_in_memory_has_the_streams(tmp_path: Path, shm: Path) -> None:
    memory = sw.Memory(snapshot_every=1, dir=str(shm))
    options: dict[str, Any] = {"memory": memory, "save_every": 100, "save_at_end": False}
    first, second = loader_of(0, 1), loader_of(0, 1)
    with sw.Checkpointer(tmp_path / "root", **options) as run:
        train_some(first, 2)
        handle = run.save(1, {"loader": first})
        assert handle is not None
        handle.committed()
    with sw.Checkpointer(tmp_path / "root", **options) as run:
        assert run.restore({"loader": second}) == 1
        assert run.last_restore is not None
        assert run.last_restore.source == "memory"
    assert torch.equal(train_some(first, 1)[0], train_some(second, 1)[0])


def test_the_checkpoint_can_be_inspected(tmp_path: Path) -> None:
    loader = loader_of(0, 1)
    train_some(loader, 2)
    sw.save(tmp_path, {"loader": loader})
    checkpoint = sw.open(tmp_path)
    assert checkpoint["loader.cursors"].shape == (16, 8)
    again = loader_of(0, 1)
    again.load_state_dict(checkpoint.to_dict()["loader"])
    assert torch.equal(train_some(loader, 1)[0], train_some(again, 1)[0])


@pytest.mark.parametrize(
    "damage",
    [
        {"cursors": torch.zeros(16, 3, dtype=torch.int64)},
        {"cursors": torch.full((16, 9), -1)},
        {"cursors": torch.full((16, 9), 2**40)},
        {"cursors": torch.zeros(4, 9, dtype=torch.int64)},
        {"cursors": None},
        {"buffers": torch.zeros(16, 1, dtype=torch.int32)},
        {"buffers": torch.full((16, 52), 13, dtype=torch.int32)},
        {"sources": None},
        {"batches": -1},
    ],
)
def test_an_invalid_state_is_refused(damage: dict[str, Any]) -> None:
    loader = loader_of(0, 1)
    train_some(loader, 2)
    with pytest.raises(sw.StateError):
        loader.load_state_dict({**loader.state_dict(), **damage})


def test_workers_may_be_spawned() -> None:
    """A dataset can be pickled, and reads the same items afterwards."""
    loader, again = loader_of(0, 1), loader_of(0, 1, pickle.loads(pickle.dumps(make_dataset())))
    train_some(loader, 3)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(train_some(loader, 1)[0], train_some(again, 1)[0])


@pytest.mark.long  # after an error, torch waits 5 s for each worker
def test_an_error_in_a_worker_names_the_sample() -> None:
    def fail(sample: Any) -> Any:
        raise LookupError("no such token")

    dataset = make_dataset(transform=fail)
    loader = loader_of(0, 1, dataset, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(LookupError, match="no such token") as caught:
        next(iter(loader))
    if sys.version_info >= (3, 11):
        assert "sample 0 in segment" in str(caught.value)


class Numbers:
    """A map dataset."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return index


def run_rank(root: Path, ledger: Path, until: int, kill_at: int, workers: int) -> int | None:
    """Train with both loaders; with `kill_at`, all ranks are killed after that step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = ElasticBatchSampler(SAMPLES, global_batch=8, last_batch="short")
    ahead: dict[str, Any] = {"prefetch_factor": 3, "multiprocessing_context": "fork"}
    more = {"persistent_workers": True, **ahead} if workers else {}
    numbers: Any = Numbers()
    indices = repeat(DataLoader(numbers, batch_sampler=sampler, num_workers=workers, **more))
    loader = ElasticStreamLoader(make_dataset(), num_workers=workers, **ahead)
    sequences = iter(loader)
    weights = torch.zeros(3)
    state = {"weights": weights, "sampler": sampler, "loader": loader}
    with sw.Checkpointer(root, save_every=SAVE_EVERY, memory=None, save_at_end=False) as run:
        step = start = run.restore(state) or 0
        while step < until:
            batch = [next(indices).tolist(), next(sequences).tolist()]
            weights += 1
            sampler.advance()
            loader.advance()
            step += 1
            (ledger / f"{step}-{rank}-{world}").write_text(json.dumps(batch))
            run.save(step, state)
            if step == kill_at:
                for worker in multiprocessing.active_children():
                    worker.kill()  # they would hold the gang's pipe open for seconds
                os.kill(os.getpid(), signal.SIGKILL)
    assert weights.tolist() == [step] * 3
    return start


def repeat(loader: DataLoader[int]) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def global_batches(ledger: Path, step: int, world: int) -> list[list[Any]]:
    parts = [json.loads((ledger / f"{step}-{rank}-{world}").read_text()) for rank in range(world)]
    return [[item for part in parts for item in part[i]] for i in range(2)]


def test_a_killed_run_continues_with_other_ranks_and_workers(gang: Gang, tmp_path: Path) -> None:
    """Real processes, loaders with workers, and checkpoints."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
    gang.run(run_rank, tmp_path / "one", alone, 14, 0, 0, world=1)
    trained_by: dict[int, int] = {}
    start = 0
    for world, workers, kill_at in [(2, 2, 5), (3, 1, 10), (1, 0, 0)]:
        arguments = (tmp_path / "root", killed, 14, kill_at, workers)
        outcomes = gang.run_outcomes(run_rank, *arguments, world=world)
        kinds = {each.kind for each in outcomes}
        # A slower rank may notice the death of a faster one, and raise instead.
        assert "died" in kinds <= {"died", "error"} if kill_at else kinds == {"value"}, outcomes
        last = kill_at or 14
        trained_by |= dict.fromkeys(range(start + 1, last + 1), world)
        start = last - last % SAVE_EVERY
    for step in range(1, 15):
        assert global_batches(killed, step, trained_by[step]) == global_batches(alone, step, 1)
    used = [index for step in range(1, 8) for index in global_batches(alone, step, 1)[0]]
    assert sorted(used) == list(range(SAMPLES))
