"""Loads global batches from the streams of a dataset, with worker processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from shardwise.data.shares import MOST_BATCHES_AHEAD, data_rank, share_of
from shardwise.data.stream_states import decode_states, encode_states
from shardwise.data.streams import (
    BatchPart,
    ElasticStreamDataset,
    StreamState,
    produce_parts,
)
from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.errors import StateError


class ElasticStreamLoader:
    """Yields this rank's part of each global batch, without end.

    A global batch has the same number of items of each stream, in the order of the streams. Each
    rank reads a contiguous part of the streams, and deals them to its workers. So the global
    batches are the same for any numbers of ranks and workers, even if these change on resume.

    Call `advance()` after each training step, before the save. With each batch, the workers send
    the states of their streams. So a save waits for no worker. The saved state is the position
    after the last batch that the model was trained on; batches read ahead do not count.

    Example:

        loader = ElasticStreamLoader(dataset, global_batch=1024, num_workers=8)
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = checkpointer.restore(state) or 0
        for batch in loader:
            train(batch)
            loader.advance()
            step += 1
            checkpointer.save(step, state)

    Args:
        dataset: the streams.
        global_batch: the number of items in the batches of all ranks together: a multiple of the
            number of streams. Default: one item of each stream. May change on resume.
        num_workers: the number of worker processes of this rank. A rank starts at most as
            many as it has streams. With 0, this process reads.
        prefetch_factor: how many batches each worker reads ahead.
        collate_fn: makes a batch of a list of items, in this process.
        multiprocessing_context: how workers start, as for `DataLoader`.
        timeout: the longest time to wait for a worker, in seconds.
        rank, world_size: the data-parallel rank, and the number of these ranks. Default: those of
            the default process group.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or there are more ranks than streams.
    """

    def __init__(
        self,
        dataset: ElasticStreamDataset,
        *,
        global_batch: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        multiprocessing_context: str | None = None,
        timeout: float = 1800.0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        caller = "ElasticStreamLoader"
        self.dataset = dataset
        self.rank, self.world_size = data_rank(caller, rank, world_size)
        if self.world_size > dataset.streams:
            raise ValueError(
                f"{caller}(world_size={self.world_size}): the dataset has only {dataset.streams} "
                "streams; create it with at least one for each rank: "
                f"ElasticStreamDataset(…, streams={self.world_size})"
            )
        batch = dataset.streams if global_batch is None else global_batch
        self.global_batch = check_integer(f"{caller}(global_batch", batch)
        if self.global_batch % dataset.streams:
            raise ValueError(
                f"{caller}(global_batch={global_batch}): expected a multiple of the number of "
                f"streams, {dataset.streams}"
            )
        self.streams = share_of(range(dataset.streams), self.rank, self.world_size)
        workers = check_integer(f"{caller}(num_workers", num_workers, least=0)
        self.num_workers = min(workers, len(self.streams))
        self._prefetch = check_integer(f"{caller}(prefetch_factor", prefetch_factor)
        self._collate = collate_fn
        self._context = multiprocessing_context
        self._timeout = timeout
        self._states = {stream: StreamState() for stream in self.streams}
        self._ahead: deque[dict[int, StreamState]] = deque()
        self._iterations = 0
        self._batches = 0

    @property
    def batches_trained(self) -> int:
        """The number of global batches that `advance()` has counted since the run began."""
        return self._batches

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss of this rank's part of a batch.

        It is 1 if all ranks have equally many streams. Otherwise, multiply the loss by it before
        `backward()`. The mean of the gradients of all ranks is then that of the global batch.
        """
        return len(self.streams) * self.world_size / self.dataset.streams

    def advance(self) -> None:
        """Record that the model was trained on the next batch. Call this after each step.

        Raises:
            StateError: all batches that were taken are counted already.
        """
        if not self._ahead:
            raise StateError(
                "advance() was called more often than batches were taken from the loader: call it "
                "once for each global batch"
            )
        self._states = self._ahead.popleft()
        self._batches += 1

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, from the first one not trained on.

        Raises:
            StateError: `advance()` was not called for thousands of batches, or another iteration
                began, or a state was loaded.
            Exception: a source or `transform` raised it.
        """
        self._iterations += 1
        self._ahead.clear()
        iteration = self._iterations
        parts = self._open_parts()
        while True:
            own = [next(parts) for _ in range(max(self.num_workers, 1))]
            if iteration != self._iterations:
                raise StateError(
                    "ElasticStreamLoader: this iteration has ended, because another one began, or "
                    "because a state was loaded: iterate over the loader again"
                )
            if len(self._ahead) >= MOST_BATCHES_AHEAD:
                raise StateError(
                    f"ElasticStreamLoader: {len(self._ahead)} batches were taken, but advance() "
                    "was not called: call it after each training step"
                )
            self._ahead.append({s: state for _, states in own for s, state in states.items()})
            yield self._collate([item for items, _ in own for item in items])

    def state_dict(self) -> dict[str, object]:
        """Return the states of this rank's streams after the last batch trained on.

        The tensors are `sw.Shards`: the checkpoint holds the streams of all ranks. All other values
        are equal on all ranks, if all ranks have called `advance()` equally often.
        """
        return {**encode_states(self.dataset, self._states), "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue after the batches that a state counts, which any number of ranks may have saved.

        Raises:
            StateError: the state belongs to other streams, or is invalid.
        """
        batches = state.get("batches")
        if type(batches) is not int or batches < 0:
            raise StateError(
                f"the state of an ElasticStreamLoader has batches={batches!r}, which is not a "
                "count: it is damaged; load another checkpoint, or leave the loader out with skip="
            )
        self._states = decode_states(self.dataset, state, self.streams)
        self._batches = batches
        self._ahead.clear()
        self._iterations += 1

    def _open_parts(self) -> Iterator[BatchPart]:
        """Return the parts of all workers in turn."""
        per_stream = self.global_batch // self.dataset.streams
        # The loader draws seeds for its workers. With its own generator, the random numbers of
        # the training do not depend on restarts.
        own_generator = torch.Generator().manual_seed(self.dataset.seed)
        return iter(
            DataLoader(
                _PartsOfWorker(self.dataset, self._states, per_stream),
                batch_size=None,
                collate_fn=_unchanged,
                num_workers=self.num_workers,
                prefetch_factor=self._prefetch if self.num_workers else None,
                multiprocessing_context=self._context if self.num_workers else None,
                timeout=self._timeout if self.num_workers else 0,
                generator=own_generator,
            )
        )


class _PartsOfWorker(IterableDataset[BatchPart]):
    """Yields, in each worker process, the parts of this worker."""

    def __init__(
        self, dataset: ElasticStreamDataset, states: Mapping[int, StreamState], per_stream: int
    ) -> None:
        self._dataset = dataset
        self._states = states
        self._per_stream = per_stream

    def __iter__(self) -> Iterator[BatchPart]:
        worker = get_worker_info()
        streams = range(min(self._states), max(self._states) + 1)
        if worker is not None:
            streams = share_of(streams, worker.id, worker.num_workers)
        own = {stream: self._states[stream] for stream in streams}
        return produce_parts(self._dataset, own, self._per_stream)


def _unchanged(part: Any) -> Any:
    return part
