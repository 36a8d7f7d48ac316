"""The options of a `Checkpointer`, and its root."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from shardwise.checkpointer.signals import AfterSignal, Signals
from shardwise.kernel import api
from shardwise.kernel.engine.check_numbers import check_integer, is_due
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.root import Root
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import StateError, StoreError, StoreUnavailableError
from shardwise.kernel.events import Sink
from shardwise.kernel.opening import steps_in_root
from shardwise.kernel.store import Store, open_store
from shardwise.parts.checks.replica_check import DivergencePolicy
from shardwise.parts.lineage import RootClaim
from shardwise.parts.memory.options import Memory
from shardwise.parts.retention import Keep
from shardwise.parts.stores.remote import can_be_reopened, is_writable, open_absolute
from shardwise.parts.tiers.options import Mirror, StorageTask
from shardwise.parts.tiers.store import TieredStore

log = logging.getLogger("shardwise")

_EQUAL_ON_ALL_RANKS = (
    "keep",
    "save_every",
    "check_replicas_every",
    "staging_bytes",
    "save_at_end",
    "on_failure",
    "on_divergence",
    "telemetry",
)
_MAY_DIFFER_BETWEEN_NODES = (
    "dir",
    "interface",
    "domain",
    "tls",
    "start_agent",
    "max_bytes_per_second",
)
"""Options of `Memory` that need not be equal on all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a `Checkpointer`. Its docstring describes them."""

    root: Store
    keep: Keep
    mirror: Mirror | None
    save_every: int
    memory: Memory | None
    check_replicas_every: int | None
    allow_pickle: bool
    staging_bytes: int | None
    on_event: Sink | None
    save_at_end: bool
    on_failure: Literal["raise", "warn"]
    on_divergence: DivergencePolicy
    telemetry: bool

    def __post_init__(self) -> None:
        if self.check_replicas_every is not None:
            check_integer("Checkpointer(check_replicas_every", self.check_replicas_every)

    def shared_options(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks: name and value as text."""
        options = {name: repr(getattr(self, name)) for name in _EQUAL_ON_ALL_RANKS}
        if self.mirror is not None:
            options["mirror"] = f"{self.mirror.place} {self.mirror.keep!r}"
        if self.memory is None:
            return {**options, "memory": "None"}
        return options | {
            f"Memory({option.name})": repr(getattr(self.memory, option.name))
            for option in fields(self.memory)
            if option.name not in _MAY_DIFFER_BETWEEN_NODES
        }

    def storage_task(self, newest: int | None, damaged: Collection[int]) -> StorageTask:
        """Return what to do in storage after the save of the step `newest`."""
        return StorageTask.of(self.root, self.keep, self.mirror, newest, damaged)

    @property
    def mirror_store(self) -> Store | None:
        """The mirror, opened; None if there is none."""
        return None if self.mirror is None else open_store(self.mirror.place)

    def store_to_read(self) -> Store:
        """Return the store to list: the root, or the root and its mirror."""
        mirror = self.mirror_store
        return self.root if mirror is None else TieredStore(self.root, mirror)

    def is_durable_step(self, step: object) -> bool:
        """Return whether this step must be saved to the root."""
        return is_due(step, self.save_every)

    def is_snapshot_step(self, step: object) -> bool:
        """Return whether a snapshot of this step must be saved in memory."""
        every = 0 if self.memory is None else self.memory.snapshot_every
        return every > 0 and is_due(step, every)


def check_options(
    keep: object,
    memory: object,
    start_from: object,
    save_on_signals: object,
    after_signal: object,
    on_failure: object,
) -> None:
    """Check the types of the options of a `Checkpointer`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: `after_signal` or `on_failure` has an unknown value.
    """
    if keep is not None and not isinstance(keep, Keep):
        raise TypeError(f"keep={keep!r}: expected sw.Keep, for example sw.Keep(last=3)")
    if memory is not None and not isinstance(memory, Memory):
        raise TypeError(
            f"memory={memory!r}: expected sw.Memory, for example sw.Memory(slots=2), or None"
        )
    if start_from is not None and not (
        callable(start_from) or isinstance(start_from, (str, os.PathLike, Store))
    ):
        raise TypeError(
            f"start_from={start_from!r}: expected a path, a store, or a function such as "
            "lambda state: sw.load(path, state)"
        )
    if isinstance(save_on_signals, (int, str)) or not isinstance(save_on_signals, Iterable):
        raise TypeError(
            f"save_on_signals={save_on_signals!r}: expected a list of signals, for example "
            "[signal.SIGTERM]"
        )
    if after_signal not in get_args(AfterSignal):
        raise ValueError(
            f"after_signal={after_signal!r}: expected 'deliver', 'requeue' or 'return'"
        )
    if on_failure not in ("raise", "warn"):
        raise ValueError(f"on_failure={on_failure!r}: expected 'raise' or 'warn'")


def open_root_store(place: api.Place, *, opened_by_agents: bool) -> Store:
    """Return the store of a root.

    Args:
        place: the root.
        opened_by_agents: whether agents must be able to open the root by its name, too.

    Raises:
        StoreError: agents cannot open the root.
    """
    store = open_absolute(place)
    if opened_by_agents and not can_be_reopened(store):
        raise StoreError(
            f"{place}: the agents that write checkpoints to storage cannot open this root: pass "
            "a path or URL, or save synchronously with memory=None"
        )
    return store


def open_mirror(
    mirror: Mirror | api.Place | None, root: Store, *, opened_by_agents: bool
) -> Mirror | None:
    """Return the mirror of a root, with its place as an opened store.

    Args:
        mirror: the user's `mirror=`.
        root: the root.
        opened_by_agents: whether agents must be able to open the mirror by its name, too.

    Raises:
        TypeError: the mirror has the wrong type.
        StoreError: agents cannot open the mirror.
        StateError: the mirror is the root itself.
    """
    if mirror is None:
        return None
    options = Mirror.of(mirror)
    store = open_root_store(options.place, opened_by_agents=opened_by_agents)
    if str(store) == str(root):
        raise StateError(
            f"mirror={str(store)!r}: this is the root itself; pass another path or URL"
        )
    return replace(options, place=store)


def install_signals(save_on_signals: Iterable[int], after_signal: AfterSignal) -> Signals | None:
    """Install handlers for the signals `save_on_signals`; return None if there are none.

    Raises:
        ValueError: as for `Signals`, or there is no Slurm job to requeue.
    """
    numbers = tuple(save_on_signals)
    if not numbers:
        return None
    job = os.environ.get("SLURM_JOB_ID")
    if after_signal == "requeue" and not job:
        raise ValueError(
            "after_signal='requeue': SLURM_JOB_ID is not set, so this is not a Slurm job: use "
            "after_signal='deliver' or after_signal='return'"
        )
    return Signals(numbers, after_signal, job)


def prepare_root_and_check_memory(
    settings: Settings,
    signals: Signals | None,
    group: Group,
    claim: RootClaim,
    *,
    has_start: bool,
) -> tuple[bool, list[int]]:
    """Check the options and the root, and remove leftovers of unfinished saves from the root.

    All ranks call this together.

    Args:
        settings: the options of this rank.
        signals: the signals that this rank handles.
        group: the ranks.
        claim: looks who saves to the root.
        has_start: whether `start_from` is given. If not, a root that is a foreign checkpoint is
            refused, because the user may have meant `start_from`.

    Returns:
        Whether snapshots can be used, and the committed steps of the root. Snapshots need a
        writable root: a file in it identifies the run.

    Raises:
        MismatchError: the options differ between ranks; the message lists the differences.
        StateError: the root is a file.
        CheckpointExistsError: the root itself is a checkpoint.
        StoreUnavailableError: the root does not answer. The message says which step this node's
            memory holds.
    """
    root, in_memory = settings.root, settings.memory is not None

    with Round(group, "comparing options") as all_ranks:
        own = {**settings.shared_options(), "start_from": "given" if has_start else "None"}
        own["save_on_signals"] = "[]" if signals is None else str(signals.numbers)
        own["after_signal"] = "" if signals is None else repr(signals.after_signal)
        all_ranks.require_equal(
            own,
            "the options of the Checkpointer differ between ranks; pass the same on all ranks:",
        )
    with Round(group, "opening a root", rank0_only=True) as all_ranks:
        found = False, list[int]()
        if group.rank == 0:
            try:
                Root(root).remove_leftovers(steps_in_root(root, may_be_foreign=has_start))
                claim.look()
                claim.known_steps = steps = Root(root).steps()
                found = in_memory and is_writable(root), steps
            except StoreUnavailableError as error:
                raise _with_snapshot_in_memory(error, root, settings.memory) from error
        can_use_memory, steps = all_ranks.broadcast(found, tuple[bool, list[int]])
    if in_memory and not can_use_memory and group.rank == 0:
        log.warning(
            "%s is read-only: checkpoints can be restored but not saved, and snapshots in "
            "memory are ignored",
            root,
        )
    return can_use_memory, steps


def _with_snapshot_in_memory(
    error: StoreUnavailableError, root: Store, memory: Memory | None
) -> StoreUnavailableError:
    """Return an error that also says which step of a root is in the memory of this node."""
    if memory is None:
        return error
    from shardwise.parts.memory.home import newest_step_here

    step = newest_step_here(memory.dir, str(root))
    if step is None:
        return error
    return StoreUnavailableError(
        f"{error}. The memory of this node keeps step {step} of this root; it cannot be restored "
        "while the root does not answer, because the root records whether the run has continued "
        "elsewhere: start the training again when the root answers"
    )


def call_at_exit(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method when this process exits, but not in a forked child."""
    process = os.getpid()

    def call() -> None:
        function = method()
        if function is not None and os.getpid() == process:
            function()

    atexit.register(call)
