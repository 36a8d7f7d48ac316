"""Random schedules of kills, world sizes and worker counts, and a simulated training.

The ledger of a training has the global batches that its weights were trained on. A kill sets the
weights back to the last save, and with them the ledger.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.data import ElasticBatchSampler, ElasticStreamLoader
from shardwise.data.shares import share_of
from shardwise.data.streams import BatchPart, produce_parts
from shardwise.ports.binding import decode, encode

Batches = list[list[Any]]
T = TypeVar("T")


class Loader(Protocol):
    """One rank's loader: yields its parts of global batches as lists."""

    def __iter__(self) -> Iterator[list[Any]]: ...
    def advance(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Life:
    """What happens between a start and a kill.

    Attributes:
        world, workers: the number of ranks, and of workers of each.
        steps: after how many steps all ranks are killed.
        taken: how many batches the training takes from the loader before it needs them.
    """

    world: int
    workers: int
    steps: int
    taken: int = 0


def random_lives(chance: random.Random, most_ranks: int, save_every: int) -> list[Life]:
    return [
        Life(
            world=chance.randint(1, most_ranks),
            workers=chance.randint(0, 4),
            steps=chance.randint(0, 2 * save_every),
            taken=chance.choice([0, 0, 1, 2]),
        )
        for _ in range(chance.randint(2, 5))
    ]


def train(
    lives: Iterable[Life],
    save_every: int,
    loaders_of: Callable[[Life], list[Any]],
    load: Callable[[list[Any], Any], None],
    save: Callable[[list[Any]], Any],
) -> Batches:
    """Train through all lives, and return the ledger.

    Args:
        loaders_of: returns the new loaders of all ranks.
        load: sets the states of all ranks to a checkpoint.
        save: returns a checkpoint.
    """
    ledger: Batches = []
    checkpoint: tuple[int, Any] = (0, None)
    for life in lives:
        loaders = loaders_of(life)
        step, saved = checkpoint
        del ledger[step:]
        if saved is not None:
            load(loaders, saved)
        batches = [repeat_epochs(each, life.taken) for each in loaders]
        for _ in range(life.steps):
            ledger.append([item for each in batches for item in next(each)])
            step += 1
            for loader in loaders:
                loader.advance()
            if step % save_every == 0:
                checkpoint = step, save(loaders)
        for each in batches:
            each.close()
    return ledger


def repeat_epochs(loader: Loader, taken: int = 0) -> Iterator[list[Any]]:
    while True:
        yield from read_ahead(iter(loader), taken)


def read_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield items, but take so many more before."""
    ahead: deque[T] = deque()
    for item in items:
        ahead.append(item)
        if len(ahead) > depth:
            yield ahead.popleft()
    yield from ahead


class ReadAhead:
    """A sampler as a `DataLoader` with workers reads it: several batches ahead of the training."""

    def __init__(self, sampler: ElasticBatchSampler, depth: int) -> None:
        self.sampler = sampler
        self._depth = depth

    def __iter__(self) -> Iterator[list[int]]:
        return read_ahead(iter(self.sampler), self._depth)

    def advance(self) -> None:
        self.sampler.advance()

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class RealLoader(ReadAhead):
    """A sampler with a `DataLoader`, whose workers return the indices."""

    def __iter__(self) -> Iterator[list[int]]:
        workers = self._depth
        more: dict[str, Any] = {"prefetch_factor": 2, "multiprocessing_context": "fork"}
        indices: Any = range(self.sampler.length)
        return iter(
            DataLoader(
                indices,
                batch_sampler=self.sampler,
                num_workers=workers,
                collate_fn=list,
                **(more if workers else {}),
            )
        )


class InOneProcess(ElasticStreamLoader):
    """A stream loader whose workers are generators; each reads some parts ahead."""

    depth = 0

    def _open_parts(self) -> Iterator[BatchPart]:
        workers = max(self.num_workers, 1)
        per_stream = self.global_batch // self.dataset.streams
        parts = []
        for worker in range(workers):
            own = {each: self._states[each] for each in share_of(self.streams, worker, workers)}
            parts.append(read_ahead(produce_parts(self.dataset, own, per_stream), self.depth))
        while True:
            yield from map(next, parts)


def save_equal(loaders: list[Loader]) -> Any:
    """Save states that are equal on all ranks, as JSON values."""
    states = [encode(each.state_dict(), "sampler") for each in loaders]
    assert all(state == states[0] for state in states)
    return states[0]


def load_equal(loaders: list[Loader], saved: Any) -> None:
    for each in loaders:
        state = decode(saved, "sampler")
        assert isinstance(state, dict)
        each.load_state_dict(state)


def save_streams(loaders: list[Loader]) -> dict[str, Any]:
    """Put the rows of all ranks together, as a checkpoint does."""
    states = [each.state_dict() for each in loaders]
    whole = dict(states[0])
    for name in ("cursors", "buffers"):
        shards: list[sw.Shards] = [state[name] for state in states]
        tensor = torch.full(shards[0].shape, -1, dtype=shards[0].dtype)
        for each in shards:
            for fragment in each.fragments:
                start = fragment.box.offset[0]
                rows = tensor[start : start + fragment.box.shape[0]]
                assert (rows == -1).all()
                rows.copy_(fragment.data)
        whole[name] = tensor
    assert (whole["cursors"] >= 0).all()
    return whole


def load_streams(loaders: list[Loader], saved: Any) -> None:
    for each in loaders:
        each.load_state_dict(saved)
