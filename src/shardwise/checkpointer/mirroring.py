"""`RunMirror`: the ranks of a training run start, follow and stop the mirroring of their root."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardwise.checkpointer.settings import Settings
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.errors import add_note
from shardwise.kernel.events import Recorder
from shardwise.kernel.store import Store
from shardwise.parts.stores.remote import is_writable
from shardwise.parts.tiers.mirror_watch import MirrorWatch
from shardwise.parts.tiers.mirroring import MirrorWorker
from shardwise.parts.tiers.options import StorageTask
from shardwise.ports.hooks import RunHook

STOP_TIMEOUT = 10.0
log = logging.getLogger("shardwise")


class RunMirror(RunHook):
    """Mirrors the root of a run.

    The agent of rank 0's node does the copying. Without agents, a thread of rank 0 does.

    Args:
        settings: the options of the Checkpointer.
        group: the ranks.
        watch: follows the mirror.
        request: has the agent of this node mirror the root; None without agents.
        damaged: steps of the root whose root and mirror are both known to be damaged.
    """

    def __init__(
        self,
        settings: Settings,
        group: Group,
        watch: MirrorWatch,
        request: Callable[[StorageTask], None] | None,
        damaged: set[int],
    ) -> None:
        self._group = group
        self._damaged = damaged
        self._watch = watch
        self._settings = settings
        self._request = request
        self._newest: int | None = None
        self._worker: MirrorWorker | None = None
        if group.rank == 0:
            self._watch.report(Recorder())  # events of earlier trainings are not reported
        self._is_mirroring = group.rank == 0 and is_writable(settings.root)
        if self._is_mirroring and request is None and settings.mirror is not None:
            self._worker = MirrorWorker(settings.root, settings.keep, settings.mirror)
            self._worker.start()
        self._update()

    def _update(self) -> None:
        """Tell the thread or agent that copies what was saved."""
        if self._worker is not None:
            self._worker.set_saved(self._newest, self._damaged)
        elif self._is_mirroring and self._request is not None:
            self._request(self._settings.storage_task(None, ()))

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """On rank 0, report copies as events, and log failures."""
        if self._group.rank == 0:
            self._watch.report(Recorder(self._settings.on_event))

    def saved(self, step: int) -> None:
        """Copy a step that was saved to the root. An agent notices new steps without this."""
        self._newest = step
        if self._worker is not None:
            self._update()

    def failed(self, error: Exception) -> None:
        """Add a note to an error of the root if the mirror fails, too.

        Old checkpoints stay in the root until they are copied, so the root may be full.
        """
        if self._group.rank == 0 and (problem := self._watch.describe_problem()):
            add_note(error, problem)
            log.error("%s", problem)

    def closed(self, *, completed: bool) -> None:
        """Wait until the mirror has all checkpoints, or log why it fails; then stop."""
        if (
            self._is_mirroring
            and completed
            and (problem := self._watch.wait_until_current(self._newest))
        ):
            log.error("%s; the next training with this root and mirror copies them", problem)
        if self._worker is not None:
            if completed:
                self._worker.wait_until_seen(STOP_TIMEOUT)
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
