"""What a training tells of itself: a line of JSON for each loss, save and load, by rank 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw


class Journal:
    """Lines of JSON in a file; without a path, nothing is told. All ranks call it together."""

    def __init__(self, path: Path | None) -> None:
        self._path = path if rank() == 0 else None

    def loss(self, step: int, loss: float) -> None:
        """The loss of a step."""
        self._write(step=step, loss=loss)

    def saved(self, handle: sw.SaveHandle | None) -> None:
        """What a save cost, if one was due. Waits until it is durable."""
        if handle is None:
            return
        report = handle.result()
        self._write(
            event="save",
            at=report.step,
            bytes=report.bytes_total,
            files=report.files,
            seconds=report.seconds["total"],
        )

    def restored(self, report: sw.RestoreReport | None) -> None:
        """What a restore cost, if there was anything to restore: bytes of all ranks."""
        if report is None:
            return
        read = torch.tensor(report.load.bytes_read)
        if dist.is_initialized():
            dist.all_reduce(read)
        self._write(
            event="load",
            at=report.step,
            place=report.load.path,
            bytes=int(read),
            files=report.load.files,
            seconds=report.load.seconds["total"],
        )

    def _write(self, **entry: object) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                print(json.dumps(entry), file=file)


def entries(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; the last may be in the making."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
