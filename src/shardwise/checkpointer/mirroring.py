"""`RunMirror`: the ranks of a training run start, follow and stop the mirroring of their root."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

from shardwise.checkpointer.settings import Settings
from shardwise.engine.group import Group
from shardwise.errors import add_note
from shardwise.events import Recorder
from shardwise.memory.mirror_tasks import MirrorTask, set_mirror_task
from shardwise.memory.trainer.save_handle import SaveHandle
from shardwise.memory.trainer.snapshots import Snapshots
from shardwise.store import Store
from shardwise.tiers.mirroring import Mirroring, SavedSteps, TierRules
from shardwise.tiers.options import Mirror
from shardwise.tiers.watch import MirrorWatch
from shardwise.tiers.worker import MirrorWorker

STOP_TIMEOUT = 10.0
log = logging.getLogger("shardwise")


class RunMirror:
    """Mirrors the root of a run.

    The agent of rank 0's node does the copying. Without agents, a thread of rank 0 does.

    Args:
        settings: the options of the Checkpointer.
        mirror: the mirror, with its place as an opened store.
        group: the ranks.
        snapshots: the snapshots of the run; None if saves go directly to storage.
        damaged: steps of the root whose root and mirror are both known to be damaged.
    """

    def __init__(
        self,
        settings: Settings,
        mirror: Mirror,
        group: Group,
        snapshots: Snapshots | None,
        damaged: set[int],
    ) -> None:
        self._leads = group.rank == 0
        self._damaged = damaged
        self._watch = MirrorWatch(settings.root)
        self._settings = settings
        self._snapshots = snapshots
        self._newest: int | None = None
        self._suspected: dict[int, float] = {}
        self._worker: MirrorWorker | None = None
        if self._leads:
            self._watch.report(Recorder())  # events of earlier trainings are not reported
        self._is_mirroring = self._leads and settings.root.is_writable()
        if self._is_mirroring and snapshots is not None:
            self._set_task(snapshots)
        elif self._is_mirroring and isinstance(mirror.place, Store):
            rules = TierRules(settings.keep, mirror.keep, mirror.budget)
            self._worker = MirrorWorker(Mirroring(settings.root, mirror.place, rules))
            self._worker.start()

    def _set_task(self, snapshots: Snapshots) -> None:
        """Request mirroring from the agent of this node."""
        root, mirror = self._settings.root, self._settings.mirror_request()
        if mirror is None:
            return
        keep = asdict(self._settings.keep)
        task = MirrorTask(root=str(root), mirror=mirror, keep=keep, suspected=self._suspected)
        try:
            set_mirror_task(snapshots.run, task)
        except OSError as error:
            log.error("the agent of this node cannot mirror %s yet: %s", root, error)
        snapshots.home.wake()

    def report_saved(self, step: int) -> None:
        """Report that a step was saved to the root. An agent notices new steps without this."""
        self._newest = step
        self._update_worker()

    def suspect(self, step: int) -> None:
        """Request to check and repair a step in the root: parts of it were read from the mirror.

        Only rank 0 sends the request.
        """
        self._suspected = {**self._suspected, step: time.time()}
        self._update_worker()
        if self._is_mirroring and self._snapshots is not None:
            self._set_task(self._snapshots)

    def _update_worker(self) -> None:
        if self._worker is not None:
            damaged = frozenset(self._damaged)
            self._worker.set_saved(SavedSteps(self._newest, damaged, self._suspected))

    def with_mirror_progress(self, handle: SaveHandle, recorder: Recorder) -> SaveHandle:
        """Return a handle that can wait for the mirror. On rank 0, report copies and failures."""
        if self._leads:
            self._watch.report(recorder)
        return handle.with_mirror(self._watch)

    def note_mirror_failure(self, error: OSError) -> None:
        """Add a note to an error of the root if the mirror fails, too.

        Old checkpoints stay in the root until they are copied, so the root may be full.
        """
        if self._leads and (problem := self._watch.describe_problem()):
            add_note(error, problem)
            log.error("%s", problem)

    def close(self, *, wait: bool) -> None:
        """Wait until the mirror has all checkpoints, or log why it fails; then stop."""
        if (
            self._is_mirroring
            and wait
            and (problem := self._watch.wait_until_current(self._newest))
        ):
            log.error("%s; the next training with this root and mirror copies them", problem)
        if self._worker is not None:
            self._worker.stop(STOP_TIMEOUT)


def warn_of_unused_mirror(root: Store) -> None:
    """Log a warning if a root has a mirror, but the Checkpointer was created without it."""
    record = MirrorWatch(root).record()
    if record is not None:
        log.warning(
            "%s has the mirror %s, which gets no copies without mirror=, and %d checkpoints that "
            "it lacks may be removed: pass mirror=, or remove mirror.json from the root",
            *(root, record.place, len(record.waiting)),
        )
