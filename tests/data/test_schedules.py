"""Random schedules of kills, world sizes and workers never change what is trained on."""

from __future__ import annotations

import random
from collections import Counter
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from shardwise.data import (
    BestFitPacker,
    ConcatPacker,
    ElasticBatchSampler,
    ElasticStreamDataset,
    ElasticStreamLoader,
)
from shardwise.data.random_order import Positions, permute
from shardwise.data.sources import Place
from shardwise.data.streams import Stream, StreamState
from tests.breadth import mostly_long
from tests.data.labelled import Labels, label_sources, tokens_of
from tests.data.schedules import (
    Batches,
    InOneProcess,
    Life,
    ReadAhead,
    RealLoader,
    load_equal,
    load_streams,
    random_lives,
    repeat_epochs,
    save_equal,
    save_streams,
    train,
)

SCHEDULES = 1000
SEQUENCES = 3
PARTS = 10
"""So many tests run a part of the schedules each. `make test` runs two of them."""


@lru_cache(maxsize=4096)
def whole_order(length: int, key: str) -> Positions:
    return permute(np.arange(length), length, key)


@pytest.fixture(autouse=True)
def _orders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute each order once, which makes the simulation several times faster."""

    def look_up(positions: Positions, length: int, key: str) -> Positions:
        return whole_order(length, key)[positions]

    monkeypatch.setattr("shardwise.data.batch_sampler.permute", look_up)
    monkeypatch.setattr("shardwise.data.sources.permute", look_up)


@pytest.mark.parametrize("part", mostly_long(range(PARTS), [0]))
def test_a_sampler_uses_each_sample_once(part: int) -> None:
    for schedule in range(part, SCHEDULES, PARTS):
        check_sampler(random.Random(schedule))


def check_sampler(chance: random.Random) -> None:
    most_ranks = chance.choice([1, 2, 3, 5, 8, 16])
    global_batch = chance.randint(most_ranks, 3 * most_ranks)
    length = chance.randint(1, 6 * global_batch)
    last_batch = chance.choice(["carry", "short"])
    if 0 < length % global_batch < most_ranks:
        last_batch = "carry"
    options: dict[str, Any] = {
        "global_batch": global_batch,
        "seed": chance.randint(0, 5),
        "shuffle": chance.random() < 0.9,
        "last_batch": last_batch,
    }
    varies = last_batch == "carry" and chance.random() < 0.3

    def loaders_of(life: Life) -> list[ReadAhead]:
        if varies:
            options["global_batch"] = chance.randint(most_ranks, 3 * most_ranks)
        return [
            ReadAhead(
                ElasticBatchSampler(length, rank=rank, world_size=life.world, **options),
                depth=2 * life.workers,
            )
            for rank in range(life.world)
        ]

    save_every = chance.randint(1, 6)
    lives = random_lives(chance, most_ranks, save_every)
    ledger = train(lives, save_every, loaders_of, load_equal, save_equal)
    one = ElasticBatchSampler(length, **{**options, "global_batch": global_batch})
    used = [index for batch in ledger for index in batch]
    count = -(-len(used) // global_batch) if varies else len(ledger)
    alone = [marked(one, batch) for batch in islice(repeat_epochs(one), count)]
    if varies:
        assert used == [index for batch in alone for index in batch][: len(used)]
    else:
        assert ledger == alone
    for start in range(0, len(used) - length + 1, length):
        assert sorted(used[start : start + length]) == list(range(length))


def marked(sampler: ElasticBatchSampler, batch: list[int]) -> list[int]:
    sampler.advance()
    return batch


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("schedule", mostly_long(range(20), [0]))
def test_real_loaders_with_worker_processes(schedule: int) -> None:
    chance = random.Random(schedule)
    most_ranks = chance.randint(2, 3)
    dataset = random_dataset(chance, streams=most_ranks * chance.randint(1, 2))
    length = chance.randint(20, 40)
    save_every = chance.randint(2, 4)
    lives = random_lives(chance, most_ranks, save_every)

    def samplers_of(life: Life) -> list[RealLoader]:
        return [
            RealLoader(
                ElasticBatchSampler(length, global_batch=6, rank=rank, world_size=life.world),
                life.workers,
            )
            for rank in range(life.world)
        ]

    def streams_of(life: Life) -> list[ElasticStreamLoader]:
        return [
            ElasticStreamLoader(
                dataset,
                num_workers=life.workers,
                multiprocessing_context="fork",
                collate_fn=plain_items,
                rank=rank,
                world_size=life.world,
            )
            for rank in range(life.world)
        ]

    alone = [Life(world=1, workers=0, steps=100)]
    for loaders_of, load, save in (
        (samplers_of, load_equal, save_equal),
        (streams_of, load_streams, save_streams),
    ):
        ledger = train(lives, save_every, loaders_of, load, save)
        assert ledger == train(alone, 101, loaders_of, load, save)[: len(ledger)]


@pytest.mark.parametrize("part", mostly_long(range(PARTS), [0]))
def test_streams_use_each_sample_once(part: int) -> None:
    for schedule in range(part, SCHEDULES, PARTS):
        check_streams(random.Random(schedule))


def check_streams(chance: random.Random) -> None:
    streams = chance.choice([1, 2, 3, 5, 8, 16])
    dataset = random_dataset(chance, streams)
    global_batch = streams * chance.randint(1, 3)

    def loaders_of(life: Life) -> list[InOneProcess]:
        loaders = []
        for rank in range(life.world):
            loaders.append(
                InOneProcess(
                    dataset,
                    global_batch=global_batch,
                    num_workers=life.workers,
                    collate_fn=plain_items,
                    rank=rank,
                    world_size=life.world,
                )
            )
            loaders[-1].depth = chance.randint(0, 3)
        return loaders

    save_every = chance.randint(1, 6)
    lives = random_lives(chance, streams, save_every)
    ledger = train(lives, save_every, loaders_of, load_streams, save_streams)
    one = InOneProcess(dataset, global_batch=global_batch, collate_fn=plain_items)
    expected: Batches = []
    for batch in islice(one, len(ledger)):
        one.advance()
        expected.append(batch)
    assert ledger == expected
    check_samples(dataset, ledger, one)


def random_dataset(chance: random.Random, streams: int) -> ElasticStreamDataset:
    sizes = [
        [chance.randint(1, 3) for _ in range(streams + chance.randint(0, streams))]
        for _ in range(chance.randint(1, 3))
    ]
    packer = chance.choice(
        [None, partial(ConcatPacker, 11), partial(BestFitPacker, 11, sequences=SEQUENCES)]
    )
    return ElasticStreamDataset(
        label_sources(*sizes),
        streams=streams,
        weights={f"s{i}": chance.randint(1, 3) for i in range(len(sizes))},
        transform=None if packer is None else tokens_of,
        packer=packer,
        seed=chance.randint(0, 5),
    )


def plain_items(items: list[Any]) -> list[Any]:
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in items]


def check_samples(dataset: ElasticStreamDataset, ledger: Batches, one: InOneProcess) -> None:
    """What the streams have read was trained on, once, or is in a buffer: nothing else."""
    items = [item for batch in ledger for item in batch]
    read: Counter[Any] = Counter()
    for stream, state in one._states.items():
        read += samples_before(dataset, stream, state)
    if dataset.packer is None:
        assert Counter(items) == read
        return
    tokens = Counter(token for item in items for token in item if token)
    expected: Counter[int] = Counter()
    for sample, times in read.items():
        expected.update(dict(Counter(tokens_of(sample).tolist() * times)))
    for stream, state in one._states.items():
        tokens.update(state.buffer[SEQUENCES:].tolist())
        if state.used_tokens:
            sample = Stream(dataset, stream, state)._reader().read()
            expected.update(tokens_of(sample)[: state.used_tokens].tolist())
    assert tokens == expected


def samples_before(dataset: ElasticStreamDataset, stream: int, state: StreamState) -> Counter[Any]:
    """Return the samples before a stream's places, computed from the orders alone."""
    found: Counter[Any] = Counter()
    for name, source in dataset.sources.items():
        place = state.places.get(name, Place())
        own = range(stream, source.segment_count, dataset.streams)
        for begun in range(place.finished_segments + 1):
            epoch, position = divmod(begun, len(own))
            order = whole_order(source.segment_count, f"{dataset.seed} {epoch} {name}")
            segment = int(order[own[position]])
            assert isinstance(source, Labels)
            count = source.sizes[segment] if begun < place.finished_segments else place.offset
            found.update((name, segment, i) for i in range(count))
    return found
