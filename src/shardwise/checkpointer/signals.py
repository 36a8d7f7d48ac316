"""SIGTERM, put off until there was time to save."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType


class Preemption:
    """Notes SIGTERM, and lets it take its course when told to.

    Raises:
        ValueError: this is not the main thread, which alone is told of signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on_sigterm: only the main thread can be told of signals")
        self.pending = False
        self._process = os.getpid()
        self._stopped = False
        self._handler = self._note  # one bound method, to be known again
        self._before = signal.signal(signal.SIGTERM, self._handler) or signal.SIG_DFL

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        # A forked child saves nothing. After `stop`, another handler has given this one back.
        if os.getpid() != self._process or self._stopped:
            self._pass_on()

    def stop(self) -> None:
        """Handle the signal as before, and one that waits at once."""
        self._stopped = True
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)
        if self.pending:
            self._pass_on()

    def _pass_on(self) -> None:
        self.pending = False
        if signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, self._before)
        signal.raise_signal(signal.SIGTERM)

    def deliver(self) -> None:
        """Let the signal take its course now, on every rank."""
        self.pending = True
        self.stop()
