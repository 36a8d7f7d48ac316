"""The user's options for a mirror: `Mirror`, and its form in records."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.engine.options import check_integer
from shardwise.events import repr_of_set_fields
from shardwise.retention import Keep, PlainKeep
from shardwise.store import Store, open_store

SMALLEST_RATE = 1 << 20


@dataclass(frozen=True, slots=True)
class Mirror:
    """A second store, which gets a copy of every checkpoint of a root.

    Args:
        place: a directory, URL or store.
        keep: which checkpoints to keep in the mirror. The default keeps all.
        max_bytes_per_second: how many bytes per second may be copied to the mirror. None: no limit.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `max_bytes_per_second` is less than 1 MiB per second.
    """

    place: str | os.PathLike[str] | Store
    keep: Keep = field(default_factory=Keep)
    max_bytes_per_second: int | None = None

    __repr__ = repr_of_set_fields

    def __post_init__(self) -> None:
        if not isinstance(self.place, (str, os.PathLike, Store)):
            raise TypeError(
                f"Mirror(place={self.place!r}): expected a path, a URL or a store, for example "
                '"s3://bucket/run"'
            )
        if not isinstance(self.keep, Keep):
            raise TypeError(f"Mirror(keep={self.keep!r}): expected sw.Keep, as in sw.Keep(last=3)")
        if self.max_bytes_per_second is not None:
            number = check_integer(
                "Mirror(max_bytes_per_second", self.max_bytes_per_second, SMALLEST_RATE
            )
            object.__setattr__(self, "max_bytes_per_second", number)

    @classmethod
    def of(cls, mirror: Mirror | str | os.PathLike[str] | Store) -> Mirror:
        """Return a user's `mirror=` as a `Mirror`."""
        return mirror if isinstance(mirror, Mirror) else cls(mirror)


@prepare_decoding
class MirrorRequest(msgspec.Struct, frozen=True):
    """A `Mirror` in the records of agents.

    Attributes:
        place: a path or URL that every process can open.
        keep: the retention rules of the mirror.
        budget: bytes per second; None for no limit.
    """

    place: str
    keep: PlainKeep = {}
    budget: int | None = None

    @classmethod
    def of(cls, mirror: Mirror) -> MirrorRequest:
        """Return the request for a mirror."""
        return cls(str(open_store(mirror.place)), asdict(mirror.keep), mirror.max_bytes_per_second)

    def options(self) -> Mirror:
        """Return the options."""
        return Mirror(self.place, Keep.decode(self.keep), self.budget)
