"""The user's options for a mirror: `Mirror`, and its form in records."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.engine.options import check_integer
from shardwise.events import repr_of_set_fields
from shardwise.retention import Keep
from shardwise.store import Store, open_store

SMALLEST_BUDGET = 1 << 20


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second store, which gets a copy of every checkpoint of a root.

    Args:
        place: a directory, URL or store.
        keep: which checkpoints to keep in the mirror. The default keeps all.
        budget: how many bytes per second may be copied to the mirror. None: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `budget` is less than 1 MiB per second.
    """

    place: str | os.PathLike[str] | Store
    keep: Keep = field(default_factory=Keep)
    budget: int | None = None

    __repr__ = repr_of_set_fields

    def __post_init__(self) -> None:
        if not isinstance(self.place, (str, os.PathLike, Store)):
            raise TypeError(
                f"Mirror(place={self.place!r}): expected a path, a URL or a store, for example "
                '"s3://bucket/run"'
            )
        if not isinstance(self.keep, Keep):
            raise TypeError(f"Mirror(keep={self.keep!r}): expected sw.Keep, as in sw.Keep(last=3)")
        if self.budget is not None:
            budget = check_integer("Mirror(budget", self.budget, SMALLEST_BUDGET)
            object.__setattr__(self, "budget", budget)

    @classmethod
    def of(cls, mirror: Mirror | str | os.PathLike[str] | Store) -> Mirror:
        """Return a user's `mirror=` as a `Mirror`."""
        return mirror if isinstance(mirror, Mirror) else cls(mirror)


@prepare_decoding
class MirrorRequest(msgspec.Struct, frozen=True):
    """A `Mirror` in the records of agents.

    Attributes:
        place: a path or URL that every process can open.
        keep: the retention rules of the mirror, as plain values.
        budget: bytes per second; None for no limit.
    """

    place: str
    keep: dict[str, Any] = {}
    budget: int | None = None

    def __post_init__(self) -> None:
        Keep.decode(self.keep)

    @classmethod
    def of(cls, mirror: Mirror) -> MirrorRequest:
        """Return the request for a mirror."""
        return cls(str(open_store(mirror.place)), asdict(mirror.keep), mirror.budget)

    def options(self) -> Mirror:
        """Return the options."""
        return Mirror(self.place, Keep.decode(self.keep), self.budget)
