"""`Tier`: the checkpoints of a tier, read again when they change."""

from __future__ import annotations

import time
from collections.abc import Callable

from shardwise.engine.commit import saved_manifest
from shardwise.manifest.names import is_file_of_save, step_directory
from shardwise.retention import CheckpointInfo, committed_steps
from shardwise.store import Store

REREAD_PERIOD = 600.0


class Tier:
    """The checkpoints of a tier.

    A manifest is read again if its directory has changed, and after `REREAD_PERIOD` seconds.

    Args:
        store: the tier.
        others_write: whether other processes save to this tier, so that directories change.
        clock: a monotonic clock, in seconds.

    Attributes:
        known: the checkpoints with intact manifests and all files, by step.
        with_leftovers: the steps of `known` that also have files of other saves.
    """

    def __init__(
        self, store: Store, *, others_write: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._others_write = others_write
        self._clock = clock
        self._read_at = clock()
        self._names: dict[int, list[str]] = {}
        self.known: dict[int, CheckpointInfo] = {}
        self.with_leftovers: set[int] = set()

    def read(self) -> dict[int, CheckpointInfo]:
        """List the tier, and return its checkpoints."""
        if self._clock() - self._read_at > REREAD_PERIOD:
            self.known, self._names, self._read_at = {}, {}, self._clock()
        found = {step: self._read_checkpoint(step) for step in committed_steps(self._store)}
        self.known = {step: each for step, each in found.items() if each is not None}
        self._names = {step: each for step, each in self._names.items() if step in self.known}
        return self.known

    def forget(self, step: int) -> None:
        """Read a step again next time."""
        self.known.pop(step, None)

    def _read_checkpoint(self, step: int) -> CheckpointInfo | None:
        """Return a checkpoint; None if its manifest is damaged, or if a file of it is missing.

        The names of data files contain the id of the save, so another save changes the names.
        """
        store = self._store.at(step_directory(step))
        if step in self.known and not self._others_write:
            return self.known[step]
        names = store.list()
        if step in self.known and self._names.get(step) == names:
            return self.known[step]
        manifest = saved_manifest(store)
        files = set() if manifest is None else {each.name for each in manifest.files}
        if manifest is None or files - set(names):
            return None
        if any(is_file_of_save(name) and name not in files for name in names):
            self.with_leftovers.add(step)
        self._names[step] = names
        return CheckpointInfo.of(manifest)
