"""The agent of a node: does what the notes beside its snapshots ask for, and serves their files.

It has no state of its own. One that is killed is followed by one that reads the same notes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardwise.memory.agent.attempts import Attempts
from shardwise.memory.agent.duties import Duty
from shardwise.memory.node.home import Home
from shardwise.memory.node.place import Place

LOOK_AROUND = 1.0
NICE = 10


class Agent:
    """Threads that look after snapshots, one for each kind of work.

    Args:
        home: the node's directory; the caller holds its lock.
        duties: what there is to do with a snapshot, by the name of the kind of work. A duty says
            whether it has done anything; it is asked again until it has not.
    """

    def __init__(self, home: Home, duties: dict[str, Duty]) -> None:
        self._home = home
        self._bells = {name: threading.Event() for name in duties}
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, args=(name, duty), name=name, daemon=True)
            for name, duty in duties.items()
        ]

    def start(self) -> None:
        """Begin to work. Training goes before it: it takes processors that nothing else wants."""
        with suppress(OSError):
            os.nice(NICE)
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """There may be something to do."""
        for bell in self._bells.values():
            bell.set()

    def stop(self, timeout: float) -> bool:
        """End the threads, between two pieces of work; whether all have within so many seconds."""
        self._stopping = True
        self.wake()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, name: str, duty: Duty) -> None:
        bell = self._bells[name]
        attempts = Attempts(name, duty)
        while not self._stopping:
            bell.wait(LOOK_AROUND)
            bell.clear()
            while not self._stopping and self._round(attempts):
                self.wake()

    def _round(self, attempts: Attempts) -> bool:
        """Look at all snapshots once; whether anything was done."""
        busy = False
        seen = set()
        for run in self._home.runs():
            kept = self._home.run(run)
            for step in kept.steps():
                place = Place(kept, step)
                seen.add(place.path)
                busy |= attempts.attempt(place)
        attempts.forget_but(seen)
        return busy


def undisturbed(duty: Duty) -> Duty:
    """The duty, on snapshots that are not being retired, and are not while it works."""

    def attend(place: Place) -> bool:
        with place.hold(shared=True) as held:
            return held and duty(place)

    return attend


def listen(bell: Path, wake: Callable[[], None]) -> None:
    """Call `wake` whenever something is written to a named pipe, which is made. Does not return."""
    with suppress(FileExistsError):
        os.mkfifo(bell, 0o600)
    fd = os.open(bell, os.O_RDWR | os.O_CLOEXEC)
    while True:
        os.read(fd, 4096)
        wake()
