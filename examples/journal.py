"""The journal of a training run: rank 0 writes a JSON line for each loss, save and load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw


class Journal:
    """A file of JSON lines; without a path, rank 0 prints them. All ranks call it together."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def loss(self, step: int, loss: float) -> None:
        """Write the loss of a step."""
        self._write(step=step, loss=loss)

    def saved(self, handle: sw.SaveHandle | None) -> None:
        """Wait until a save is durable and write its cost; skip a save that was not due."""
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
        """Write the cost of a restore, if there was one, with the bytes read by all ranks."""
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
        if rank() != 0:
            return
        if self._path is None:
            print(json.dumps(entry), flush=True)
            return
        with self._path.open("a") as file:
            print(json.dumps(entry), file=file)


def entries(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a journal; the last one may still be written."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
