"""A root's `run.json`: the run, the steps from which it was resumed, and who saves to the root.

An epoch is the time between two resumptions of a run: the first epoch is 0, and each resumption
begins the next epoch. Each save records its epoch. A run that resumes from step 20 supersedes the
steps after 20 of all earlier epochs, because it will compute these steps again.

The lineage of a run is the list of its resumptions. The step and the epoch of a save, compared with
the lineage, show whether the run has superseded the save.

The *owner* is the Checkpointer that saves to the root. Each Checkpointer claims the root at its
first save, and again at the first save after a restore that found another owner.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import CheckpointExistsError, StoreError, StoreUnavailableError
from shardwise.kernel.store import Store

RUN_FILE = "run.json"
LARGEST_RUN_FILE = 1 << 14
MOST_RESUMPTIONS = 64
BEFORE_ALL_STEPS = -1

Epoch = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Step = Annotated[int, msgspec.Meta(ge=BEFORE_ALL_STEPS, le=2**62)]


def new_run_id() -> str:
    """Return a new random run id."""
    return secrets.token_hex(8)


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
        owner: the id of the Checkpointer that saves to the root; "" before the first save.
    """

    run: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    resumptions: tuple[Resumption, ...] = ()
    owner: str = ""

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
        return Lineage(self.run, (*kept, Resumption(self.epoch + 1, first)), self.owner)

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


def resume_from(root: Store, run: str, step: int | None, owner: str | None = None) -> Lineage:
    """Record in the root that a run is resumed from a step; return the new lineage.

    Args:
        step: None for the beginning.
        owner: the owner when the restore listed the steps of the root; None: do not compare it.

    Raises:
        CheckpointExistsError: another job has begun to save to the root since then.
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
    if owner is not None and before.owner != owner:
        raise _taken_error(root)
    after = before.after_resuming(step)
    root.publish(RUN_FILE, msgspec.json.encode(after), replace=True)
    return after


class RootClaim:
    """The claim of one Checkpointer to its root, so that two jobs never mix their steps.

    A job that looked at the root before another job claimed it is refused at its first save. A job
    that looks later, such as a restart, takes the root over; no save of the earlier job is then
    committed. Only rank 0 calls these methods.

    Args:
        root: the root.

    Attributes:
        id: the id of the Checkpointer, which becomes the owner of the root.
        seen: the owner that the last look at the root found.
        known_steps: the committed steps that the root had then. A claim refuses other steps. None
            if this Checkpointer has restored: it continues the training that saves to the root.
        epoch: the epoch of this Checkpointer; None if it saves without agents.
    """

    def __init__(self, root: Store) -> None:
        self.id, self.seen = new_run_id(), ""
        self._has_saved = False
        self.known_steps: Sequence[int] | None = ()
        self.epoch: int | None = None
        self._root = root

    def look(self) -> None:
        """Read who owns the root. Look before you list its steps.

        Raises:
            StoreUnavailableError: the root does not answer.
        """
        try:
            lineage = read_lineage(self._root)
        except StoreUnavailableError:
            raise
        except StoreError:  # damaged: `take` refuses it, but reading checkpoints does not need it
            return
        self.seen = lineage.owner if lineage else ""

    def for_agents(self, *, force: bool) -> tuple[str, str | None]:
        """Return what agents need to claim the root: `id`; and `seen`, or None for any owner.

        Only the first save may take the root from any owner.
        """
        is_forced, self._has_saved = force and not self._has_saved, True
        return self.id, None if is_forced else self.seen

    def take(self, *, force: bool) -> None:
        """Claim the root, unless this Checkpointer has claimed it.

        Args:
            force: whether to take it from another job, as `overwrite=True` asks for.

        Raises:
            CheckpointExistsError: another job has claimed the root since the last look.
            StoreError: the root cannot be read or written.
        """
        if self.seen == self.id:
            return
        lineage = read_lineage(self._root)
        if lineage is None:
            self._refuse_new_steps(force=force)
            with suppress(FileExistsError):
                own = Lineage(new_run_id(), owner=self.id)
                self._root.publish(RUN_FILE, msgspec.json.encode(own), replace=False)
                self.seen = self.id
                return
            lineage = _read_run_file(self._root)
        with Root(self._root).wait_for_lock(
            lineage.run,
            "cannot lock the root for the first save, because another process holds its lock: "
            "another job that makes its first save here; save again",
        ):
            lineage = _read_run_file(self._root)
            is_resumed = self.epoch is not None and lineage.epoch != self.epoch
            if not force and (lineage.owner != self.seen or is_resumed):
                raise _taken_error(self._root)
            self._refuse_new_steps(force=force)
            own = msgspec.structs.replace(lineage, owner=self.id)
            self._root.publish(RUN_FILE, msgspec.json.encode(own), replace=True)
        self.seen = self.id

    @staticmethod
    def take_for(root: Store, lineage: Lineage, owner: str, seen: str | None) -> None:
        """Claim the root for a trainer that has not done so, before an agent commits its save.

        Args:
            root: the root.
            lineage: the lineage of the root; the save is of its epoch.
            owner, seen: what `for_agents` returned.

        Raises:
            CheckpointExistsError: another job has claimed the root.
        """
        if owner and lineage.owner != owner:
            claim = RootClaim(root)
            claim.id, claim.seen, claim.known_steps = owner, seen or "", None
            claim.epoch = lineage.epoch
            claim.take(force=seen is None)

    def require(self) -> None:
        """Check directly before a commit that the root still belongs to this Checkpointer.

        Raises:
            CheckpointExistsError: another job has taken the root over.
        """
        lineage = read_lineage(self._root)
        if lineage is not None and lineage.owner != self.id:
            raise _taken_error(self._root)

    def _refuse_new_steps(self, *, force: bool) -> None:
        if (
            not force
            and self.known_steps is not None
            and (new := Root(self._root).steps(besides=self.known_steps))
        ):
            raise _taken_error(self._root, f" (step {new[0]})")


def _taken_error(root: Store, what: str = "") -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{root}: nothing is saved, because another job saves to this root{what}, and the steps of "
        "two jobs would mix. If it is a restart of this training, stop this job. If it is another "
        "training, pass a new root to one of them. To continue from its steps, stop it and call "
        "restore before the next save; overwrite=True in the first save takes the root over"
    )


def _read_run_file(root: Store) -> Lineage:
    data = root.read(RUN_FILE, limit=LARGEST_RUN_FILE)
    try:
        return msgspec.json.decode(data, type=Lineage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{root}: {RUN_FILE} is damaged ({error}); remove the file. The next training then "
            "begins a new run, which does not use snapshots in memory"
        ) from error
