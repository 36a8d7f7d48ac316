"""The options of a `Checkpointer`, and its root."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Literal, get_args

import msgspec

from shardwise import api
from shardwise.checkpointer.signals import Signals, Then
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.leftovers import remove_leftovers
from shardwise.engine.options import is_due
from shardwise.errors import MismatchError, StoreError
from shardwise.events import Sink
from shardwise.manifest.names import step_of_directory
from shardwise.memory.options import Memory
from shardwise.opening import refuse_as_root, refuse_file
from shardwise.retention import Keep
from shardwise.store import LocalStore, Store, local_path, open_store

log = logging.getLogger("shardwise")

_SHARED = ("keep", "save_every", "check_replicas", "staging_bytes", "at_end", "on_failure")
_OF_A_NODE = ("dir", "interface", "domain", "tls", "start_agent", "budget")
"""Options of `Memory` that may differ between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of a `Checkpointer`, which describes them."""

    root: Store
    keep: Keep
    save_every: int
    memory: Memory | None
    check_replicas: bool
    allow_pickle: bool
    staging_bytes: int
    on_event: Sink | None
    at_end: bool
    on_failure: Literal["raise", "warn"]

    def shared(self) -> dict[str, str]:
        """Return, as text, the options that must be equal on all ranks."""
        found = {name: repr(getattr(self, name)) for name in _SHARED}
        if self.memory is None:
            return {**found, "memory": "None"}
        return found | {
            f"Memory({each.name})": repr(getattr(self.memory, each.name))
            for each in fields(self.memory)
            if each.name not in _OF_A_NODE
        }

    def is_durable(self, step: object) -> bool:
        """Return whether this step is saved to the root."""
        return is_due(step, self.save_every)

    def is_snapshot(self, step: object) -> bool:
        """Return whether a snapshot of this step is kept in memory."""
        in_memory = self.memory is not None and self.memory.snapshot_every
        return bool(in_memory) and is_due(step, in_memory)


def check_options(
    keep: object,
    memory: object,
    start_from: object,
    save_on: object,
    then: object,
    on_failure: object,
) -> None:
    """Check the types of the options of a `Checkpointer`.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: `then` or `on_failure` has an unknown value.
    """
    if keep is not None and not isinstance(keep, Keep):
        raise TypeError(f"keep={keep!r}: expected sw.Keep, for example sw.Keep(last=3)")
    if memory is not None and not isinstance(memory, Memory):
        raise TypeError(f"memory={memory!r}: expected sw.Memory(...) or None")
    if start_from is not None and not (
        callable(start_from) or isinstance(start_from, (str, os.PathLike, Store))
    ):
        raise TypeError(f"start_from={start_from!r}: expected a path, a store or a function")
    if isinstance(save_on, (int, str)) or not isinstance(save_on, Iterable):
        raise TypeError(f"save_on={save_on!r}: expected a list, for example [signal.SIGTERM]")
    if then not in get_args(Then):
        raise ValueError(f"then={then!r}: expected 'deliver', 'requeue' or 'return'")
    if on_failure not in ("raise", "warn"):
        raise ValueError(f"on_failure={on_failure!r}: expected 'raise' or 'warn'")


def root_of(place: api.Place, *, everywhere: bool) -> Store:
    """Return the store of a root. With `everywhere`, agents must be able to open it by its name."""
    if everywhere and not isinstance(place, (str, os.PathLike, LocalStore)):
        raise StoreError(
            f"{place}: the agents that write checkpoints to storage cannot open this root: pass "
            "a path or URL, or save synchronously with memory=None"
        )
    store = open_store(place)
    path = local_path(store)
    return store if path is None else LocalStore(path.absolute())


def signals_of(save_on: Iterable[int], then: Then) -> Signals | None:
    """Install the handlers for `save_on`; return None if it is empty.

    Raises:
        ValueError: as for `Signals`, or there is no Slurm job to requeue.
    """
    numbers = tuple(save_on)
    if not numbers:
        return None
    job = os.environ.get("SLURM_JOB_ID")
    if then == "requeue" and not job:
        raise ValueError("then='requeue': SLURM_JOB_ID is not set: this is not a Slurm job")
    return Signals(numbers, then, job)


def open_root(settings: Settings, signals: Signals | None, group: Group, *, starts: bool) -> bool:
    """Check a root and remove leftovers of unfinished saves. All ranks call this together.

    Args:
        settings: options of this rank.
        signals: signals that this rank handles.
        group: the ranks.
        starts: whether `start_from` is given. If not, a root that is a checkpoint is refused: the
            user may have meant to start from it.

    Returns:
        Whether snapshots can be used. A read-only root does not allow them, because they are
        identified by a file in the root.

    Raises:
        MismatchError: the options differ between ranks; the message lists the differences.
        StateError: the root is a file.
        CheckpointExistsError: the root itself is a checkpoint.
    """
    root, in_memory = settings.root, settings.memory is not None

    def speak() -> bytes:
        handled = {"save_on": "[]"}
        if signals is not None:
            handled = {"save_on": str(signals.numbers), "then": repr(signals.then)}
        return msgspec.msgpack.encode({**settings.shared(), **handled})

    def answer(said: list[bytes]) -> bytes:
        _refuse_unequal([msgspec.msgpack.decode(each, type=dict[str, str]) for each in said])
        refuse_file(root)
        if not starts:
            refuse_as_root(root)
        for name in root.list():
            if step_of_directory(name) is not None:
                store = root.at(name)
                with suppress(OSError):  # leftovers in a read-only root stay
                    remove_leftovers(store)
                    store.remove()  # if it is empty
        return b"1" if in_memory and _is_writable(root) else b""

    usable = bool(exchange(group, "opening a root", speak, answer))
    if in_memory and not usable and group.rank == 0:
        log.warning(
            "%s is read-only: checkpoints can be restored but not saved, and snapshots in "
            "memory are ignored",
            root,
        )
    return usable


def _refuse_unequal(options: Sequence[Mapping[str, str]]) -> None:
    names = dict.fromkeys(name for each in options for name in each)
    problems = []
    for name in names:
        values = [each.get(name, "nothing") for each in options]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is not None:
            problems.append(f"{name}: rank 0 has {values[0]}, rank {rank} has {values[rank]}")
    if problems:
        raise MismatchError("the options of the Checkpointer differ between ranks:", problems)


def _is_writable(root: Store) -> bool:
    path = local_path(root)
    if path is None:
        return True
    existing = next(each for each in (path, *path.parents) if each.exists())
    return os.access(existing, os.W_OK)
