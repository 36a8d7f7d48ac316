"""The agent of a node: does what the records beside its snapshots ask for, and serves their files.

It has no state of its own. One that is killed is followed by one that reads the same records.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from shardwise.memory.agent.attempts import Attempts, Duty, Seen
from shardwise.memory.home import Held, Home, Place

LOOK_AROUND = 1.0
NICE = 10
log = logging.getLogger("shardwise.agent")


class Agent:
    """Threads that look after snapshots: one that looks around, and one for each kind of work.

    Args:
        home: the node's directory; the caller holds its lock.
        duties: what there is to do with a snapshot, by the name of the kind of work.
        around: called whenever it looks around.
    """

    def __init__(
        self,
        home: Home,
        duties: Mapping[str, Duty],
        around: Callable[[], object] = lambda: None,
    ) -> None:
        self._home = home
        self._around = around
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._workers = [_Worker(name, duty, self) for name, duty in duties.items()]
        self._looking = threading.Thread(target=self._look_around, name="look", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        for worker in self._workers:
            worker.thread.start()
        self._looking.start()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is to be begun."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """There may be something to do."""
        self._bell.set()

    def stop(self, timeout: float) -> bool:
        """End the threads, between two pieces of work; whether all have within so many seconds."""
        self._stopping.set()
        self.wake()
        deadline = time.monotonic() + timeout
        threads = [self._looking, *(worker.thread for worker in self._workers)]
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _look_around(self) -> None:
        _give_way()
        while not self.is_stopping:
            self._bell.wait(LOOK_AROUND)
            self._bell.clear()
            try:
                self._around()
                seen = list(self._snapshots())
            except Exception:
                log.exception("looking around in %s", self._home)
                continue
            for worker in self._workers:
                worker.offer(seen)
        for worker in self._workers:
            worker.call()

    def _snapshots(self) -> Iterator[Seen]:
        """All snapshots of the node, by the names of their files."""
        for name in self._home.runs():
            run = self._home.run(name)
            names = {step: frozenset(Place(run, step).named("")) for step in run.steps()}
            for step in names:
                yield Seen(Place(run, step), names)


class _Worker:
    """Does one kind of work, on one snapshot after the other."""

    def __init__(self, name: str, duty: Duty, agent: Agent) -> None:
        self._attempts = Attempts(name, duty)
        self._agent = agent
        self._seen: list[Seen] = []
        self._called = threading.Event()
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def offer(self, seen: list[Seen]) -> None:
        """Have it look at these snapshots, if there may be something to do with any of them."""
        self._seen = seen
        if any(map(self._attempts.is_due, seen)):
            self.call()

    def call(self) -> None:
        """Wake it."""
        self._called.set()

    def _work(self) -> None:
        _give_way()
        while not self._agent.is_stopping:
            self._called.wait()
            self._called.clear()
            seen = self._seen
            for each in seen:
                if self._agent.is_stopping:
                    return
                if self._attempts.is_due(each) and self._attempts.attempt(each):
                    self._agent.wake()
            self._attempts.forget_but({each.place.path for each in seen})


def _give_way() -> None:
    """Training goes before what this thread does, and those that it starts: they take processors
    that nothing else wants. Whoever serves others does not: a restore waits for that."""
    with suppress(OSError):
        os.nice(NICE)  # of this thread alone, as Linux has it


def undisturbed(attend: Callable[[Place], bool]) -> Callable[[Place], bool]:
    """Work on snapshots that are not being retired, and are not while it is done."""

    def attend_undisturbed(place: Place) -> bool:
        with place.hold(shared=True) as held:
            if not held:
                raise Held(place)
            return attend(place)

    return attend_undisturbed


def listen(bell: Path, wake: Callable[[], None]) -> None:
    """Call `wake` whenever something is written to a named pipe, which is made. Does not return."""
    with suppress(FileExistsError):
        os.mkfifo(bell, 0o600)
    fd = os.open(bell, os.O_RDWR | os.O_CLOEXEC)
    while True:
        os.read(fd, 4096)
        wake()
