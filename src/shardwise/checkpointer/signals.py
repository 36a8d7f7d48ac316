"""Signals that ask a training to end, held back until there was time to save."""

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
    """Notes signals, and does what is asked for once the state is saved.

    The handlers set a flag, and do nothing else.

    Args:
        numbers: the signals.
        then: what follows the save. `"deliver"`: the signal, handled as before. `"requeue"`: Slurm
            is asked to run the job again. `"return"`: nothing.
        job: the Slurm job to requeue.

    Raises:
        ValueError: these are no signals that can be handled, or this is not the main thread.
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
        self._handler = self._note  # one bound method, so that it can be recognised
        self._before = {}
        try:
            for number in numbers:
                self._before[number] = signal.signal(number, self._handler) or signal.SIG_DFL
        except (OSError, TypeError, ValueError) as error:
            self._restore()
            raise ValueError(f"save_on={numbers!r}: {error}") from error

    @property
    def numbers(self) -> list[int]:
        """The signals that are noted, ascending."""
        return sorted(map(int, self._before))

    def received(self, group: Group) -> int:
        """The signal that any rank has received, or 0. All ranks together."""

        def answer(said: list[bytes]) -> bytes:
            return b"%d" % max(map(int, said))

        return int(exchange(group, "asking for signals", lambda: b"%d" % self._pending, answer))

    def finish(self, number: int, group: Group) -> None:
        """Do what follows the save that a signal has asked for, on every rank."""
        self.acted = True
        if self.then == "deliver":
            self._pending = number
            self.stop()
            return
        self._pending = 0
        if self.then == "requeue" and group.rank == 0 and self._job is not None:
            _requeue(self._job)

    def stop(self) -> None:
        """Handle signals as before. One that came too late for a save is delivered now, unless
        `then` says otherwise."""
        self._stopped = True
        self._restore()
        if self._pending and self.then != "deliver":
            name = signal.Signals(self._pending).name
            log.warning("%s came after the last save, and is ignored: then=%r", name, self.then)
        elif self._pending:
            self._pass_on(self._pending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending = number
        # A forked child saves nothing. After `stop`, another handler has put this one back.
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
    """Ask Slurm to run this job again; it then ends the present processes."""
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SLURM_TIMEOUT)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        log.error("the job is saved but not requeued: %s: %s", " ".join(command), said)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("the job is saved but not requeued: %s: %s", " ".join(command), error)
    else:
        log.warning("the job is saved and requeued: %s", " ".join(command))
