"""The user's options for a mirror, `Mirror`; and `StorageTask`, what to do after a save."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.engine.root import Root
from shardwise.kernel.events import repr_of_set_fields
from shardwise.kernel.manifest.manifest import Count
from shardwise.kernel.store import Store, open_store
from shardwise.parts.retention import Keep, apply_retention
from shardwise.parts.tiers.decide import SavedSteps

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
        return cls(str(open_store(mirror.place)), asdict(mirror.keep), mirror.max_bytes_per_second)

    def options(self) -> Mirror:
        """Return the options."""
        return Mirror(self.place, Keep.decode(self.keep), self.budget)


@prepare_decoding
class StorageTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to do in storage after a save: remove old checkpoints, or keep a mirror up to date.

    Attributes:
        root: the root of the checkpoints.
        keep: the retention rules of the root, as plain values.
        mirror: the mirror of the root, or None. With a mirror, the threads that copy to it also
            remove checkpoints, and only those that they have copied.
        newest: the step that was saved last; None if no step was saved yet. Newer steps are not
            removed.
        damaged: steps in the root that are known to be damaged. They do not count as kept, and are
            not removed.
    """

    root: str
    keep: dict[str, Any] = {}
    mirror: MirrorRequest | None = None
    newest: Count | None = None
    damaged: list[int] = []

    def __post_init__(self) -> None:
        Keep.decode(self.keep)

    @classmethod
    def of(
        cls,
        root: Store,
        keep: Keep,
        mirror: Mirror | None,
        newest: int | None = None,
        damaged: Collection[int] = (),
    ) -> StorageTask:
        """Return the task for a root and its mirror; see the attributes."""
        return cls(
            root=str(root),
            keep=asdict(keep),
            mirror=None if mirror is None else MirrorRequest.of(mirror),
            newest=newest,
            damaged=sorted(damaged),
        )

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do. Without rules, the root keeps all checkpoints."""
        return self.mirror is not None or self.rules.has_rules

    @property
    def rules(self) -> Keep:
        """The retention rules of the root."""
        return Keep.decode(self.keep)

    @property
    def saved_steps(self) -> SavedSteps:
        """What the task says about the steps of the root."""
        return self.newest, self.damaged

    def remove_old(self, root: Store, should_continue: Callable[[], bool] = lambda: True) -> None:
        """Remove the checkpoints of the root that its rules do not keep.

        Raises:
            OSError: as for `apply_retention`.
        """
        apply_retention(
            Root(root),
            self.rules,
            newest=self.newest or 0,
            damaged=frozenset(self.damaged),
            should_continue=should_continue,
        )
