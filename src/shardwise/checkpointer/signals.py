"""SIGTERM, put off until there was time to save."""

from __future__ import annotations

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
        self._stopped = False
        self._handler = self._note  # one bound method, to be known again
        self._before = signal.signal(signal.SIGTERM, self._handler) or signal.SIG_DFL

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if self._stopped:  # another handler, installed after this one, has given it back
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
