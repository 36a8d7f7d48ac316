"""Which run a root is of, and where that has gone back: what `run.json` in the root says."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgspec

from shardwise.errors import StoreError
from shardwise.memory.home import new_run
from shardwise.store import Store

RUN = "run.json"
LARGEST_RUN = 1 << 14
MOST_BRANCHES = 64
BEGINNING = -1

Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Step = Annotated[int, msgspec.Meta(ge=BEGINNING, le=2**62)]


class Branch(msgspec.Struct, array_like=True, frozen=True):
    """In this epoch, the run goes on from this step: newer ones of epochs before are abandoned."""

    epoch: Epoch
    step: Step


class Lineage(msgspec.Struct, frozen=True):
    """A run, and its branches: later ones begin at later steps, or would say all by themselves."""

    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    branches: tuple[Branch, ...] = ()

    @property
    def epoch(self) -> int:
        """The one that the run is in."""
        return self.branches[-1].epoch if self.branches else 0

    def resumed_from(self, step: int | None) -> Lineage:
        """The same run, which begins another epoch after a step, or from the beginning."""
        begins = BEGINNING if step is None else step
        kept = [each for each in self.branches if each.step < begins]
        if len(kept) >= MOST_BRANCHES:  # as one they abandon more, of what is long gone
            kept[:2] = [Branch(kept[1].epoch, kept[0].step)]
        return Lineage(self.run, (*kept, Branch(self.epoch + 1, begins)))

    def newest_before(self, step: int) -> Branch | None:
        """The last branch that abandons this step, of epochs before it."""
        return next((each for each in reversed(self.branches) if each.step < step), None)


def lineage_of(root: Store) -> Lineage:
    """The run that persists to a root; a new one, if the root is new.

    It lies in the root, so that a run that is begun anew, in a root that was emptied, never takes
    snapshots of the one before for its own.

    Raises:
        StoreError: what the root says is damaged.
    """
    for _ in range(2):
        with suppress(FileNotFoundError):
            return _read(root)
        with suppress(FileExistsError):
            root.publish(RUN, msgspec.json.encode(Lineage(new_run())), replace=False)
    raise StoreError(f"{root}: {RUN} comes and goes")


def known_lineage(root: Store) -> Lineage | None:
    """The run that persists to a root; None if none does.

    Raises:
        StoreError: what the root says is damaged.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return _read(root)
    return None


def resume_from(root: Store, run: str, step: int | None) -> Lineage:
    """Have a run go on from a step, or from the beginning, for good; what it is from then on.

    Raises:
        StoreError: that cannot be written down, or the root is another run's by now.
    """
    try:
        before = _read(root)
    except FileNotFoundError as error:
        raise StoreError(f"{root}: {RUN} disappeared, though the run goes on") from error
    if before.run != run:
        raise StoreError(f"{root} was begun anew by run {before.run}, though run {run} goes on")
    after = before.resumed_from(step)
    root.publish(RUN, msgspec.json.encode(after), replace=True)
    return after


def _read(root: Store) -> Lineage:
    data = root.read(RUN, limit=LARGEST_RUN)
    try:
        return msgspec.json.decode(data, type=Lineage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{root}: {RUN} is damaged ({error}); remove it") from error
