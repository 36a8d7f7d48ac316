"""What an agent has to say, in a file of bounded size: it lies in memory."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

LARGEST = 1 << 20


def log_to(path: Path) -> logging.Handler:
    """A handler that writes to a file, as do stdout and stderr of this process from now on."""
    return _Bounded(path)


def open_log(path: Path) -> BinaryIO:
    """The file, for a process that is about to start; set aside if it is full."""
    with suppress(FileNotFoundError):
        if path.stat().st_size > LARGEST:
            path.replace(_older(path))
    return path.open("ab")


def log_tail(path: Path) -> str:
    """The last that was said."""
    said: list[str] = []
    for each in (_older(path), path):
        with suppress(OSError):
            said += each.read_text(errors="replace").splitlines()
    return "\n".join(said[-10:]) or "(it has no log)"


class _Bounded(RotatingFileHandler):
    """Sets the file aside when it is full, and stdout and stderr follow to the new one."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LARGEST, backupCount=1, encoding="utf-8")
        self.namer = lambda _: str(_older(path))
        self._redirect()

    def doRollover(self) -> None:  # noqa: N802
        super().doRollover()
        self._redirect()

    def _redirect(self) -> None:
        if self.stream is not None:
            for fd in (1, 2):
                os.dup2(self.stream.fileno(), fd)


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")
