"""How a `Checkpointer` saves: which steps, through memory or straight to storage, and retention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shardwise import api
from shardwise.adapters import optimizers_in
from shardwise.engine.collection import without_collection
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions, checked_step, is_due
from shardwise.engine.save import Save, save_all
from shardwise.errors import StateError
from shardwise.events import Recorder, Sink
from shardwise.manifest.names import step_directory
from shardwise.memory.options import Memory
from shardwise.memory.snapshots.draft import Storing
from shardwise.memory.snapshots.handle import SaveHandle
from shardwise.memory.snapshots.snapshots import Snapshots
from shardwise.plan.cache import PlanCache
from shardwise.retention import Keep, apply_retention
from shardwise.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a `Checkpointer` was asked for; see there."""

    root: Store
    keep: Keep
    save_every: int
    memory: Memory | None
    check_replicas: bool
    allow_pickle: bool
    staging_bytes: int
    on_event: Sink | None

    def is_durable(self, step: object) -> bool:
        """Whether this step is saved to the root."""
        return is_due(step, self.save_every)

    def is_snapshot(self, step: object) -> bool:
        """Whether this step is kept in memory."""
        in_memory = self.memory is not None and self.memory.snapshot_every
        return bool(in_memory) and is_due(step, in_memory)


class Saving:
    """Saves the steps of a run. All ranks call its methods together.

    Args:
        settings: of the Checkpointer.
        group: the ranks.
        snapshots: the run's snapshots in memory; None if saves go straight to storage.
        damaged: steps that `restore` found to be damaged; a save replaces them.
    """

    def __init__(
        self, settings: Settings, group: Group, snapshots: Snapshots | None, damaged: set[int]
    ) -> None:
        self._settings = settings
        self._group = group
        self._snapshots = snapshots
        self._damaged = damaged
        self._fenced: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        self.plans = PlanCache()

    def save(
        self,
        step: int,
        state: api.State,
        metrics: Mapping[str, float] | None,
        *,
        durable: bool,
        overwrite: bool,
    ) -> SaveHandle | None:
        """Save a step, then remove checkpoints that are no longer kept.

        Args:
            durable: save it to the root; otherwise only into memory.

        Returns:
            None if there was no slot for its snapshot.
        """
        settings = self._settings
        recorder = Recorder(settings.on_event)
        overwrite = overwrite or step in self._damaged

        def prepare() -> Save:
            number = checked_step(step)
            options = SaveOptions.checked(number, overwrite, settings.check_replicas, metrics)
            if durable:
                self._refuse_unranked(options)
            return self._job(state, settings.root.at(step_directory(number)), options)

        with without_collection():
            if self._snapshots is not None:
                self._fence_steps(state)
                damaged = tuple(sorted(self._damaged - {step}))
                storing = Storing(durable, settings.keep, damaged)
                handle = self._snapshots.save(prepare, storing, self.plans, recorder)
            else:
                handle = SaveHandle(save_all(prepare, self._group, self.plans, recorder))
        if handle is not None:
            self._damaged.discard(step)
            if self._snapshots is None:
                self._retain(step)
        return handle

    def prepare(self, state: api.State) -> int:
        """Allocate the memory that snapshots of this state take; the bytes for this rank."""
        snapshots = self._snapshots
        if snapshots is None:
            return 0

        def job() -> Save:
            return self._job(state, self._settings.root, SaveOptions())

        with without_collection():
            return snapshots.prepare(job, self.plans, Recorder(self._settings.on_event))

    def close(self) -> None:
        """Remove the hooks from optimizers."""
        for hook in self._fenced.values():
            hook.remove()

    def _job(self, state: api.State, store: Store, options: SaveOptions) -> Save:
        held = api.held_by(state, allow_pickle=self._settings.allow_pickle)
        return Save(
            held=held, store=store, staging_bytes=self._settings.staging_bytes, options=options
        )

    def _refuse_unranked(self, options: SaveOptions) -> None:
        best = self._settings.keep.best
        if best is not None and best.metric not in options.metrics:
            raise StateError(
                f"metrics= has no {best.metric!r}, which Keep(best=...) needs: "
                'pass float("nan") if it was not measured'
            )

    def _fence_steps(self, state: Mapping[str, object]) -> None:
        """Have the steps of all optimizers in the state wait for copies that are under way."""
        memory = self._settings.memory
        if self._snapshots is None or memory is None or not memory.overlap:
            return
        fence = self._snapshots.fence
        for optimizer in optimizers_in(state):
            if optimizer not in self._fenced:
                self._fenced[optimizer] = optimizer.register_step_pre_hook(lambda *_: fence())

    def _retain(self, newest: int) -> None:
        settings = self._settings

        def answer(_: list[bytes]) -> bytes:
            damaged = frozenset(self._damaged)
            apply_retention(settings.root, settings.keep, newest=newest, damaged=damaged)
            return b""

        exchange(self._group, "removing old checkpoints", lambda: b"", answer)
