"""A root's `run.json`: the run it belongs to, and the steps from which the run was resumed.

An epoch is the time between two resumptions of a run: the first epoch is 0, and each resumption
begins the next epoch. Each save records its epoch. A run that resumes from step 20 supersedes the
steps after 20 of all earlier epochs, because it will compute these steps again.

The lineage of a run is the list of its resumptions. The step and the epoch of a save, compared with
the lineage, show whether the run has superseded the save.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import StoreError
from shardwise.memory.home import new_run_id
from shardwise.store import Store

RUN_FILE = "run.json"
LARGEST_RUN_FILE = 1 << 14
MOST_RESUMPTIONS = 64
BEFORE_ALL_STEPS = -1

Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Step = Annotated[int, msgspec.Meta(ge=BEFORE_ALL_STEPS, le=2**62)]


class Resumption(msgspec.Struct, array_like=True, frozen=True):
    """A resumption of a run: the epoch that it began, and the step from which the run resumed.

    The run supersedes the steps of earlier epochs that are newer than `step`.
    """

    epoch: Epoch
    step: Step


@prepare_decoding
class Lineage(msgspec.Struct, frozen=True, rename={"resumptions": "branches"}):
    """A run, and its resumptions.

    Attributes:
        run: the id of the run, 16 hexadecimal digits.
        resumptions: the resumptions by ascending step. A resumption replaces earlier ones from the
            same step or a newer step.
    """

    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    resumptions: tuple[Resumption, ...] = ()

    @property
    def epoch(self) -> int:
        """The current epoch of the run."""
        return self.resumptions[-1].epoch if self.resumptions else 0

    def after_resuming(self, step: int | None) -> Lineage:
        """Return the lineage after the run is resumed from a step, which begins a new epoch.

        Args:
            step: the step; None for the beginning.
        """
        first = BEFORE_ALL_STEPS if step is None else step
        kept = [each for each in self.resumptions if each.step < first]
        if len(kept) >= MOST_RESUMPTIONS:
            # Merge the oldest two. The merged resumption supersedes more snapshots than both did,
            # but these snapshots were freed long ago.
            kept[:2] = [Resumption(kept[1].epoch, kept[0].step)]
        return Lineage(self.run, (*kept, Resumption(self.epoch + 1, first)))

    def last_resumption_before(self, step: int) -> Resumption | None:
        """Return the last resumption from a step before `step`, or None.

        It supersedes saves of this step in earlier epochs.
        """
        return next((each for each in reversed(self.resumptions) if each.step < step), None)

    def supersedes(self, step: int, epoch: int) -> bool:
        """Return whether the run has superseded a save of this step and epoch."""
        resumption = self.last_resumption_before(step)
        return resumption is not None and epoch < resumption.epoch


def read_or_create_lineage(root: Store) -> Lineage:
    """Return the lineage of the run that saves to a root; begin a new run if the root has none.

    The root stores the id of the run. After a root was emptied, a new run begins. It never uses the
    snapshots of the previous run.

    Raises:
        StoreError: the file in the root is damaged.
    """
    for _ in range(2):
        with suppress(FileNotFoundError):
            return _read_run_file(root)
        with suppress(FileExistsError):
            root.publish(RUN_FILE, msgspec.json.encode(Lineage(new_run_id())), replace=False)
    raise StoreError(
        f"{root}: cannot read {RUN_FILE}: another process creates and removes it again and again; "
        "make sure that nothing else removes files from the root"
    )


def read_lineage(root: Store) -> Lineage | None:
    """Return the lineage of the run that saves to a root; None if the root has no run.

    Raises:
        StoreError: the file in the root is damaged.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return _read_run_file(root)
    return None


def resume_from(root: Store, run: str, step: int | None) -> Lineage:
    """Record in the root that a run is resumed from a step; return the new lineage.

    Args:
        step: None for the beginning.

    Raises:
        StoreError: the file in the root is missing, damaged, or belongs to another run.
    """
    try:
        before = _read_run_file(root)
    except FileNotFoundError as error:
        raise StoreError(
            f"{root}: cannot resume run {run}: {RUN_FILE} was removed while the run is in use; "
            "restart the training"
        ) from error
    if before.run != run:
        raise StoreError(
            f"{root}: cannot resume run {run}: the root was emptied meanwhile, and run "
            f"{before.run} saves to it now; stop one of the two"
        )
    after = before.after_resuming(step)
    root.publish(RUN_FILE, msgspec.json.encode(after), replace=True)
    return after


def _read_run_file(root: Store) -> Lineage:
    data = root.read(RUN_FILE, limit=LARGEST_RUN_FILE)
    try:
        return msgspec.json.decode(data, type=Lineage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{root}: {RUN_FILE} is damaged ({error}); remove the file. The next training then "
            "begins a new run, which does not use snapshots in memory"
        ) from error
