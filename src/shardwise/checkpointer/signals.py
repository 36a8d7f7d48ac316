"""Signals that end the training, deferred until the state is saved."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Literal

from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round

AfterSignal = Literal["deliver", "requeue", "return"]
"""The action after the save that a signal caused: see `Checkpointer(after_signal=…)`."""

SLURM_TIMEOUT = 60.0  # seconds

log = logging.getLogger("shardwise")


class Signals:
    """Handlers that record signals, so that `Checkpointer.save` can act on them.

    Args:
        numbers: the signals to handle.
        after_signal: the action after the save. `"deliver"`: raise the signal with its previous
            handler. `"requeue"`: ask Slurm to run the job again. `"return"`: none.
        job: the id of the Slurm job to requeue.

    Attributes:
        has_acted: whether a signal has caused a save.

    Raises:
        ValueError: a signal cannot be handled, or this is not the main thread.
    """

    def __init__(self, numbers: Iterable[int], after_signal: AfterSignal, job: str | None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "save_on_signals: Python handles signals in the main thread only: create the "
                "Checkpointer there, or omit save_on_signals"
            )
        self.has_acted = False
        self.after_signal = after_signal
        self._job = job
        self._pending = 0
        self._process = os.getpid()
        self._stopped = False
        self._handler = self._record_signal  # one bound method, to compare with signal.getsignal()
        self._previous_handlers = {}
        try:
            for number in numbers:
                previous = signal.signal(number, self._handler)
                self._previous_handlers[number] = previous or signal.SIG_DFL
        except (OSError, TypeError, ValueError) as error:
            self._restore_handlers()
            raise ValueError(
                f"save_on_signals={numbers!r}: cannot handle a signal: {error}; pass signals such "
                "as [signal.SIGTERM, signal.SIGUSR1]"
            ) from error

    @property
    def numbers(self) -> list[int]:
        """The signals that are handled, ascending."""
        return sorted(map(int, self._previous_handlers))

    def find_received_signal(self, group: Group) -> int:
        """Return a signal that any rank has received, or 0. All ranks call this together."""
        with Round(group, "asking for signals") as all_ranks:
            return all_ranks.all_reduce(self._pending, int, max)

    def act_on_signal(self, number: int, group: Group) -> None:
        """Act on a signal after its save. All ranks call this together."""
        self.has_acted = True
        if self.after_signal == "deliver":
            self._pending = number
            self.stop()
            return
        self._pending = 0
        if self.after_signal == "requeue" and group.rank == 0 and self._job is not None:
            _requeue(self._job)

    def stop(self) -> None:
        """Restore the previous handlers.

        A signal that arrived after the last save is delivered if `after_signal` is "deliver".
        Otherwise a warning is logged.
        """
        self._stopped = True
        self._restore_handlers()
        if self._pending and self.after_signal != "deliver":
            name = signal.Signals(self._pending).name
            log.warning(
                "%s arrived after the last save; ignored (after_signal=%r)", name, self.after_signal
            )
        elif self._pending:
            self._deliver(self._pending)

    def _record_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child does not save. After `stop`, another library may install this handler
        # again. In both cases, the signal goes to the previous handler.
        if os.getpid() == self._process and not self._stopped:
            self._pending = number
        elif signal.getsignal(number) is self._handler:
            self._deliver(number)
        # Otherwise, another library has installed its own handler, which calls this handler.
        elif callable(previous := self._previous_handlers[number]):
            previous(number, frame)

    def _deliver(self, number: int) -> None:
        self._pending = 0
        self._restore_handlers()
        signal.raise_signal(number)

    def _restore_handlers(self) -> None:
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) is self._handler:
                signal.signal(number, previous)


def _requeue(job: str) -> None:
    """Ask Slurm to run this job again. Slurm then ends the current processes."""
    command = ["scontrol", "requeue", job]
    failure = ""
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=SLURM_TIMEOUT)
    except subprocess.CalledProcessError as error:
        failure = error.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    else:
        log.warning("saved, and the job is requeued: %s", " ".join(command))
        return
    log.error(
        "saved, but the job was not requeued: %s: %s; requeue it yourself",
        *(" ".join(command), failure),
    )
