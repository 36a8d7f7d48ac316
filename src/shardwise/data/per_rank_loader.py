"""Keeps the state of a loader that cannot be divided among another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from shardwise.data.shares import data_rank
from shardwise.kernel.errors import StateError

_WHAT_TO_DO = (
    "Load with the same numbers, or leave the loader's state out with skip=, which begins its "
    "data anew. ElasticBatchSampler and ElasticStreamLoader resume with any numbers"
)


class StatefulLoader(Protocol):
    """A loader with a state, for example torchdata's `StatefulDataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Set the state."""
        ...


class PerRankLoader:
    """Saves the state of a torchdata `StatefulDataLoader` on each rank, and loads it there.

    The loader resumes after the batch that it yielded last, with the same data as without the
    interruption, if nothing has changed. This is what it cannot do:

    - resume with another number of data-parallel ranks, because the state of a rank describes its
      part of the data. A load raises StateError.
    - resume with another number of workers, because each worker has a part of the state. A load
      raises StateError.
    - know which batches were trained on. Take a batch from the loader only when the step before it
      is done. If a library fetches one batch ahead, a resume skips this batch.

    Example:

        loader = StatefulDataLoader(dataset, batch_size=32, num_workers=4)
        state = {"model": model, "loader": PerRankLoader(loader)}
        checkpointer.restore(state)

    Args:
        loader: the loader.
        rank, world_size: the data-parallel rank, and the number of these ranks. Default: those of
            the default process group.

    Raises:
        TypeError, ValueError: `rank` or `world_size` is invalid.
    """

    def __init__(
        self, loader: StatefulLoader, *, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.loader = loader
        self._rank, self._world_size = data_rank("PerRankLoader", rank, world_size)

    def capture(self) -> dict[str, Any]:
        """Return the loader's state, and the numbers that it depends on."""
        return {**self._numbers(), "state": self.loader.state_dict()}

    def restore(self, value: Mapping[str, Any]) -> None:
        """Set the loader's state.

        Raises:
            StateError: the state was saved by another rank, or with another number of ranks or
                workers.
        """
        changed = [
            f"{name} was {value.get(name)!r} and is {number!r}"
            for name, number in self._numbers().items()
            if value.get(name) != number
        ]
        if changed:
            raise StateError(
                f"{type(self.loader).__name__} has one state for each rank and each worker, which "
                f"cannot be divided anew: {'; '.join(changed)}. {_WHAT_TO_DO}"
            )
        self.loader.load_state_dict(value["state"])

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the saved value of this rank.

        Raises:
            StateError: another number of ranks has saved.
        """
        if len(values) != world:
            raise StateError(
                f"{type(self.loader).__name__} has one state for each rank, which cannot be "
                f"divided anew: {len(values)} ranks have saved, and {world} load. {_WHAT_TO_DO}"
            )
        return values[rank]

    def _numbers(self) -> dict[str, int]:
        workers = int(getattr(self.loader, "num_workers", 0))
        return {"rank": self._rank, "world_size": self._world_size, "num_workers": workers}
