"""Global batches of a map dataset that are the same for any number of ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np
from torch.utils.data import Sampler

from shardwise.data.random_order import MOST_ITEMS, ORDER_VERSION, Positions, permute
from shardwise.data.shares import MOST_BATCHES_AHEAD, data_rank, share_of
from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.errors import StateError

log = logging.getLogger("shardwise")


class ElasticBatchSampler(Sampler[list[int]]):
    """Yields this rank's indices of each global batch. Every sample is used once in each epoch.

    The order of the samples depends only on `length`, `seed` and `shuffle`. Each global batch is
    the next `global_batch` samples of this order, divided among the ranks. So the global batches
    are the same for any number of ranks and of workers, also if they change on resume.

    Call `advance()` after each training step, before the save. The state counts the samples that
    the model was trained on, not those that workers have read ahead.

    Example:

        sampler = ElasticBatchSampler(len(dataset), global_batch=512)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=8)
        state = {"model": model, "optimizer": optimizer, "sampler": sampler}
        checkpointer.restore(state)
        for batch in loader:  # the rest of the epoch
            train(batch)
            sampler.advance()
            step += 1
            checkpointer.save(step, state)

    Args:
        length: the number of samples of the dataset, from 1 to 2⁶².
        global_batch: the number of samples in the batches of all ranks together.
        seed: selects the random order. Each epoch has another order.
        shuffle: use a random order. Otherwise, samples are in order of their index.
        last_batch: what happens if `global_batch` does not divide `length`. `"carry"`: the batch
            at the end of an epoch continues with the first samples of the next epoch, so that all
            batches have the same size. `"short"`: the last batch of an epoch is smaller.
        rank, world_size: the data-parallel rank, and the number of these ranks. Default: those of
            the default process group.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or a batch has fewer samples than there are ranks.
    """

    def __init__(
        self,
        length: int,
        *,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: Literal["carry", "short"] = "carry",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        caller = "ElasticBatchSampler"
        self.length = check_integer(f"{caller}(length", length)
        self.global_batch = check_integer(f"{caller}(global_batch", global_batch)
        self.seed = check_integer(f"{caller}(seed", seed, least=0)
        self.shuffle = bool(shuffle)
        self.last_batch = last_batch
        self.rank, self.world_size = data_rank(caller, rank, world_size)
        if self.length > MOST_ITEMS:
            raise ValueError(f"{caller}(length={self.length}): expected at most 2⁶² samples")
        if last_batch not in ("carry", "short"):
            raise ValueError(f"{caller}(last_batch={last_batch!r}): expected 'carry' or 'short'")
        self._check_every_rank_gets_samples()
        self._position = 0
        self._batches = 0  # of the current epoch, trained on
        self._drawn = 0
        self._ahead = 0
        self._loads = 0

    @property
    def samples_trained(self) -> int:
        """The number of samples of all ranks that `advance()` has counted, in all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next sample to train on, counted from 0."""
        return self._position // self.length

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss of this rank's part of the batch that is trained on now.

        It is 1 if all ranks have parts of the same size. Otherwise, multiply the loss by it before
        `backward()`. The mean of the gradients of all ranks is then that of the global batch.
        """
        batch = self._batch_from(self._position)
        return len(share_of(batch, self.rank, self.world_size)) * self.world_size / len(batch)

    def advance(self) -> None:
        """Count the next global batch as trained on. All ranks call this after each step.

        Raises:
            StateError: the sampler has not yielded that batch.
        """
        batch = self._batch_from(self._position)
        if batch.stop > self._drawn:
            raise StateError(
                f"advance() was called for the batch of samples {batch.start} to {batch.stop - 1}, "
                "which was not read yet: call advance() once for each global batch"
            )
        self._batches = self._batches + 1 if batch.stop < self._end_of_epoch(batch.start) else 0
        self._position = batch.stop
        self._ahead = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices, from the first batch not trained on to the epoch's end.

        Raises:
            StateError: `advance()` was never called for thousands of batches, or a state was
                loaded after the iteration began.
        """
        loads, position = self._loads, self._position
        if self._ahead >= self._remaining_batches():
            log.warning(
                "ElasticBatchSampler: epoch %d begins again at sample %d, because advance() was "
                "not called since: call it after each training step",
                *(self.epoch, position % self.length),
            )
        end = self._end_of_epoch(position)
        while position < end:
            if loads != self._loads:
                raise StateError(
                    "ElasticBatchSampler: a state was loaded after this iteration began: iterate "
                    "over the loader again"
                )
            if self._ahead >= MOST_BATCHES_AHEAD:
                raise StateError(
                    f"ElasticBatchSampler: {self._ahead} batches were read, but advance() was not "
                    "called: call it after each training step"
                )
            batch = self._batch_from(position)
            position = batch.stop
            self._drawn = max(self._drawn, position)
            self._ahead += 1
            yield self._indices(share_of(batch, self.rank, self.world_size))

    def __len__(self) -> int:
        """The number of batches of this epoch, including those that were trained on already.

        After a restore in the middle of an epoch, an iteration yields fewer batches: the rest.
        """
        return self._batches + self._remaining_batches()

    def state_dict(self) -> dict[str, object]:
        """Return the position, and the settings that determine the order. Equal on all ranks."""
        return {**self._order(), "samples": self._position, "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue after the samples that a state counts.

        The number of ranks, `global_batch` and `last_batch` may have changed.

        Raises:
            StateError: the state belongs to another order of samples, or is invalid; or the last
                batch of its epoch would have fewer samples than there are ranks.
        """
        samples, batches = state.get("samples"), state.get("batches")
        changed = [
            f"{name}={state.get(name)!r}, here {value!r}"
            for name, value in self._order().items()
            if state.get(name) != value
        ]
        if changed:
            raise StateError(
                f"the state of an ElasticBatchSampler has {'; '.join(changed)}: its position means "
                "nothing in another order of samples. Pass the same settings, or leave the state "
                "out to begin a new epoch"
            )
        if type(samples) is not int or type(batches) is not int or not 0 <= batches <= samples:
            raise StateError(
                f"the state of an ElasticBatchSampler has samples={samples!r} and "
                f"batches={batches!r}: expected integers, with 0 <= batches <= samples: it is "
                "damaged; load another checkpoint, or leave the sampler out with skip="
            )
        left = self.length - samples % self.length
        if problem := self._find_too_short_batch(left):
            raise StateError(
                f"the state of an ElasticBatchSampler has samples={samples}, after which {left} "
                f"samples of the epoch remain: {problem}"
            )
        self._position = self._drawn = samples
        self._batches = batches
        self._ahead = 0
        self._loads += 1

    def _order(self) -> dict[str, object]:
        return {
            "version": ORDER_VERSION,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def _remaining_batches(self) -> int:
        """Return the number of batches from the first one not trained on to the epoch's end."""
        remaining = self._end_of_epoch(self._position) - self._position
        return (remaining + self.global_batch - 1) // self.global_batch

    def _end_of_epoch(self, position: int) -> int:
        return (position // self.length + 1) * self.length

    def _batch_from(self, position: int) -> range:
        """Return the positions of the global batch that begins at a position."""
        end = position + self.global_batch
        if self.last_batch == "short":
            end = min(end, self._end_of_epoch(position))
        return range(position, end)

    def _indices(self, positions: range) -> list[int]:
        indices: list[int] = []
        while positions:
            epoch, first = divmod(positions.start, self.length)
            count = min(len(positions), self.length - first)
            places: Positions = np.arange(first, first + count, dtype=np.int64)
            if self.shuffle:
                places = permute(places, self.length, f"{self.seed} {epoch}")
            indices += places.tolist()
            positions = positions[count:]
        return indices

    def _check_every_rank_gets_samples(self) -> None:
        if self.global_batch < self.world_size:
            raise ValueError(
                f"ElasticBatchSampler(global_batch={self.global_batch}): less than one sample for "
                f"each of {self.world_size} ranks: raise global_batch, or use fewer ranks"
            )
        if problem := self._find_too_short_batch(self.length):
            raise ValueError(
                f"ElasticBatchSampler(last_batch='short'): an epoch has {self.length} samples: "
                f"{problem}"
            )

    def _find_too_short_batch(self, samples: int) -> str | None:
        """Return a message if some rank gets nothing of the last batch of these samples."""
        last = samples % self.global_batch or self.global_batch
        if self.last_batch == "carry" or last >= self.world_size:
            return None
        return (
            f"the last batch has {last}, too few for {self.world_size} ranks: pass "
            "last_batch='carry', or another global_batch"
        )
