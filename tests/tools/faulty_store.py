"""A store for fault tests. It counts operations; at one, it raises or kills the process."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar
from unittest import mock

from shardwise.kernel.store import LocalStore
from shardwise.ports.store import Store, open_store
from tests.tools.wrapped_store import WrappedStore

T = TypeVar("T")
Action = Callable[[str], None]


def kill_process(operation: str) -> None:
    """Kill this process, as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def make_os_error_action(error_number: int) -> Action:
    """Return an action that raises an `OSError` with an error number, such as `errno.ENOSPC`."""

    def raise_os_error(operation: str) -> None:
        raise OSError(error_number, os.strerror(error_number), operation)

    return raise_os_error


@dataclass(slots=True)
class Fault:
    """A fault to inject before an operation. A store and all stores below it share the fault.

    Args:
        index: index of the operation before which `action` is called, counted from 0; None to only
            count operations.
        action: the function to call. Its argument is the name of the operation: `verb key`.
        verbs: the verbs of the operations to count; all if empty.
        sticky: whether to call `action` before all later operations too, as on a full disk.

    Attributes:
        operations: the names of the operations so far.
    """

    index: int | None = None
    action: Action = kill_process
    verbs: tuple[str, ...] = ()
    sticky: bool = False
    operations: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_operation(self, verb: str, key: str) -> None:
        """Count an operation that will happen next. Inject the fault if it belongs before it."""
        if self.verbs and verb not in self.verbs:
            return
        name = f"{verb} {key}"
        with self._lock:
            index = len(self.operations)
            self.operations.append(name)
        if self.index is not None and (index == self.index or (self.sticky and index > self.index)):
            self.action(name)


class FaultyStore(WrappedStore):
    """Wraps the store of a place, and reports every operation to a `Fault` before it happens.

    The system calls of `publish` of a `LocalStore` count as operations, too.
    """

    def __init__(self, store: Store | str | os.PathLike[str], fault: Fault) -> None:
        super().__init__(open_store(store))
        self._fault = fault

    def at(self, name: str) -> FaultyStore:
        """Return the store one level below, with the same fault."""
        return FaultyStore(self.store.at(name), self._fault)

    def run(self, operation: str, path: str, act: Callable[[], T]) -> T:
        """Count an operation before it happens, and a publication also when it has happened."""
        self._fault.count_operation(operation, path)
        if operation != "publish":
            return act()
        with (
            _count_system_calls(self._fault)
            if isinstance(self.store, LocalStore)
            else nullcontext()
        ):
            result = act()
        self._fault.count_operation("published", path)
        return result


@contextmanager
def _count_system_calls(fault: Fault) -> Iterator[None]:
    """Count the system calls of a publication as operations of the fault."""
    with (
        mock.patch.multiple(
            os,
            fsync=_with_counting(os.fsync, "fsync", fault),
            replace=_with_counting(os.replace, "replace", fault),
            link=_with_counting(os.link, "link", fault),
            unlink=_with_counting(os.unlink, "unlink", fault),
        ),
    ):
        yield


def _with_counting(call: Callable[..., object], verb: str, fault: Fault) -> Callable[..., object]:
    def counted_call(*args: object, **kwargs: object) -> object:
        fault.count_operation(verb, "")
        return call(*args, **kwargs)

    return counted_call


FULL_DISK = make_os_error_action(errno.ENOSPC)
READ_ONLY = make_os_error_action(errno.EROFS)
