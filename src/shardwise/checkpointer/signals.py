"""Signals that end a training, deferred until the state is saved."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Literal

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group

Then = Literal["deliver", "requeue", "return"]
SLURM_TIMEOUT = 60.0

log = logging.getLogger("shardwise")


class Signals:
    """Handlers that record signals, to act on them after the next save.

    Args:
        numbers: the signals.
        then: action after the save. `"deliver"`: raise the signal with its previous handler.
            `"requeue"`: ask Slurm to run the job again. `"return"`: none.
        job: id of the Slurm job to requeue.

    Raises:
        ValueError: a signal cannot be handled, or this is not the main thread.
    """

    def __init__(self, numbers: Iterable[int], then: Then, job: str | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("save_on: Python handles signals in the main thread only")
        self.acted = False
        self.then = then
        self._job = job
        self._pending = 0
        self._process = os.getpid()
        self._stopped = False
        self._handler = self._note  # keep one bound method, to compare with getsignal()
        self._before = {}
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._handler) or signal.SIG_DFL
        except (OSError, TypeError, ValueError) as error:
            self._restore()
            raise ValueError(f"save_on={numbers!r}: {error}") from error

    @property
    def numbers(self) -> list[int]:
        """The signals that are handled, ascending."""
        return sorted(map(int, self._before))

    def received(self, group: Group) -> int:
        """Return a signal that any rank has received, or 0. All ranks call this together."""

        def answer(said: list[bytes]) -> bytes:
            return b"%d" % max(map(int, said))

        return int(exchange(group, "asking for signals", lambda: b"%d" % self._pending, answer))

    def finish(self, number: int, group: Group) -> None:
        """Act on a signal after its save. All ranks call this together."""
        self.acted = True
        if self.then == "deliver":
            self._pending = number
            self.stop()
            return
        self._pending = 0
        if self.then == "requeue" and group.rank == 0 and self._job is not None:
            _requeue(self._job)

    def stop(self) -> None:
        """Restore the previous handlers. Deliver a signal that arrived after the last save if
        `then` is "deliver"; otherwise log a warning."""
        self._stopped = True
        self._restore()
        if self._pending and self.then != "deliver":
            name = signal.Signals(self._pending).name
            log.warning("%s arrived after the last save; ignored (then=%r)", name, self.then)
        elif self._pending:
            self._pass_on(self._pending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
        # A forked child does not save. After `stop`, another library may have reinstalled this.
        if os.getpid() != self._process or self._stopped:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._pending = 0
        self._restore()
        signal.raise_signal(number)

    def _restore(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, before)


def _requeue(job: str) -> None:
    """Ask Slurm to run this job again, which ends the current processes."""
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SLURM_TIMEOUT)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        log.error("saved, but the job was not requeued: %s: %s", " ".join(command), said)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("saved, but the job was not requeued: %s: %s", " ".join(command), error)
    else:
        log.warning("saved, and the job is requeued: %s", " ".join(command))
