"""Per-rank values: values in the state that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from shardwise.kernel.errors import StateError

Resize = Callable[[list[Any], int, int], Any]


@runtime_checkable
class Stateful(Protocol):
    """An object with `state_dict` and `load_state_dict`, for example an LR scheduler."""

    def state_dict(self) -> object:
        """Return the object's state: plain values, tensors and `Shards`."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set the object's state."""
        ...


@runtime_checkable
class PerRankValue(Protocol):
    """What objects implement to be saved for each rank, without being wrapped in `PerRank`."""

    def capture(self) -> Any:
        """Return this rank's value as a plain value."""
        ...

    def restore(self, value: Any) -> None:
        """Set the value."""
        ...

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the value for a rank that loads.

        Args:
            values: the values of all ranks that saved. If the world size is unchanged, only
                `values[rank]` was read, and the other entries are None. Otherwise, each value is
                read when it is asked for: with thousands of ranks, ask for few.
            rank: the rank that loads.
            world: the number of ranks that load.
        """
        ...


class PerRank:
    """A value in the state that differs between ranks.

    If as many ranks load as have saved, each rank gets its own value back.

    Example:

        def first_offset(values, rank, world):  # values: the offset of each rank that saved
            return min(values)

        state = {"model": model, "offset": sw.PerRank(offset, resize=first_offset)}

    Args:
        value: the value of this rank: a plain value, or an object with `state_dict` and
            `load_state_dict`.
        resize: called by a load with another world size, as `resize(values, rank, world)` with the
            values of all ranks that saved; returns the value of the rank. If it is None, such a
            load raises StateError.

    Attributes:
        value: the value of this rank. A load sets it.
    """

    def __init__(self, value: Any, *, resize: Resize | None = None) -> None:
        self.value = value
        self._resize = resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def capture(self) -> Any:
        """Return the value, or its state_dict()."""
        return self.value.state_dict() if isinstance(self.value, Stateful) else self.value

    def restore(self, value: Any) -> None:
        """Set the value, or call its load_state_dict()."""
        if isinstance(self.value, Stateful):
            self.value.load_state_dict(value)
        else:
            self.value = value

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the saved value of this rank, or the result of `resize` if the world size differs.

        Raises:
            StateError: the world size differs, and `resize` is None.
        """
        if len(values) == world:
            return values[rank]
        if self._resize is None:
            saved = f"{len(values)} rank{'s' if len(values) > 1 else ''}"
            raise StateError(
                f"a per-rank value was saved by {saved} and is loaded by {world}: define the "
                "value of each rank with sw.PerRank(value, resize=lambda values, rank, world: …)"
            )
        return self._resize(list(values), rank, world)
