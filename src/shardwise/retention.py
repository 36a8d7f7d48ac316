"""Which checkpoints of a root to keep, and how the others go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from shardwise.engine.leftovers import collect_leftovers
from shardwise.errors import FormatError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import MANIFEST, step_directory, step_of_directory
from shardwise.store import Store

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Which checkpoints to keep: those that any rule keeps, and always the newest.

    Without any rule, all are kept.

    Args:
        last: the newest so many.
        multiple_of: those whose step is a multiple of this.
        best: those with the best values of this metric, as given to `Checkpointer.save`.
        best_of: how many of these.
        mode: whether smaller (`"min"`) or larger (`"max"`) is better.

    Raises:
        ValueError: a number is not positive, or rules do not go together.
    """

    last: int | None = None
    multiple_of: int | None = None
    best: str | None = None
    best_of: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name, value in (
            ("last", self.last),
            ("multiple_of", self.multiple_of),
            ("best_of", self.best_of),
        ):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Keep({name}={value!r}): a whole number from 1 on is needed")
        if self.best is None and self.best_of != 1:
            raise ValueError(f"Keep(best_of={self.best_of}) needs best=, the name of a metric")
        if self.mode not in ("min", "max"):
            raise ValueError(f"Keep(mode={self.mode!r}): 'min' or 'max' is needed")

    @property
    def removes(self) -> bool:
        """Whether there is a rule, so that any go."""
        return not (self.last is None and self.multiple_of is None and self.best is None)

    def kept(self, steps: Sequence[int], metrics: Mapping[int, Metrics]) -> set[int]:
        """Which of these steps are kept."""
        ordered = sorted(steps)
        if not self.removes:
            return set(ordered)
        kept = set(ordered[-(self.last or 1) :])
        if self.multiple_of is not None:
            kept |= {step for step in ordered if step % self.multiple_of == 0}
        if self.best is not None:
            sign = 1 if self.mode == "min" else -1
            values = ((metrics[step].get(self.best), step) for step in ordered)
            ranked = sorted((sign * v, -step) for v, step in values if v is not None)
            kept |= {-negative for _, negative in ranked[: self.best_of]}
        return kept


def committed_steps(root: Store) -> list[int]:
    """The steps below a root that have a manifest, ascending."""
    steps = [step for name in root.list() if (step := step_of_directory(name)) is not None]
    return sorted(s for s in steps if MANIFEST in root.at(step_directory(s)).list())


def apply_retention(
    root: Store,
    keep: Keep,
    *,
    newest: int,
    damaged: frozenset[int],
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[int]:
    """Remove what `keep` does not keep of the steps up to `newest`, which was just saved.

    Steps that are known to be damaged neither count nor go, and one that is being read stays
    until the next time.

    Args:
        is_wanted: asked before each is removed; if it is not, all others stay.

    Returns:
        The steps that were removed.
    """
    steps = [s for s in committed_steps(root) if s <= newest and s not in damaged]
    metrics = {s: _metrics(root.at(step_directory(s))) for s in steps if keep.best is not None}
    kept = keep.kept(steps, metrics) | {newest}
    gone = takewhile(lambda _: is_wanted(), (s for s in steps if s not in kept))
    return [s for s in gone if remove_checkpoint(root.at(step_directory(s)))]


def remove_checkpoint(store: Store) -> bool:
    """Remove a checkpoint, manifest first, unless it is being read; whether it is gone."""
    with store.hold(MANIFEST, shared=False) as held:
        if not held:
            return False
        store.delete(MANIFEST)
    collect_leftovers(store)
    with suppress(OSError):  # files that no save has made stay
        store.remove()
    return True


def _metrics(store: Store) -> Metrics:
    try:
        return decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST)).metrics
    except (FormatError, OSError):
        return {}
