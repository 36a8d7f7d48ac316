"""Values that each rank has of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from shardwise.errors import StateError

Resize = Callable[[list[Any], int, int], Any]


@runtime_checkable
class PerRankValue(Protocol):
    """A value in the state that differs between ranks."""

    def capture(self) -> Any:
        """Return this rank's value as a plain value."""
        ...

    def restore(self, value: Any) -> None:
        """Set the value."""
        ...

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the value for a rank that loads.

        Args:
            values: values of all ranks that saved. If the world has the same size, only
                `values[rank]` was read.
            rank, world: rank that loads, and its world size.
        """
        ...


class PerRank:
    """A value that differs between ranks: plain, or with state_dict and load_state_dict.

    If the world size is the same at the load, each rank gets its own value back.

    Attributes:
        value: the value; after a load, the value for this rank.

    Args:
        value: the value of this rank.
        resize: for a load with another world size: a function of all saved values, the rank and
            the new world size that returns the value of the rank. Without it, such a load is an
            error.
    """

    def __init__(self, value: Any, *, resize: Resize | None = None) -> None:
        self.value = value
        self._resize = resize

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def capture(self) -> Any:
        """Return the value, or its state_dict()."""
        return self.value.state_dict() if _is_stateful(self.value) else self.value

    def restore(self, value: Any) -> None:
        """Set the value, or call its load_state_dict()."""
        if _is_stateful(self.value):
            self.value.load_state_dict(value)
        else:
            self.value = value

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return this rank's value, or what `resize` returns for another world size.

        Raises:
            StateError: the world size differs, and there is no `resize`.
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


def _is_stateful(value: object) -> bool:
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, method, None)) for method in methods)
