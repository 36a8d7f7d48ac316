"""Scalars of TensorBoard for saves and restores: seconds of each stage, and bandwidth."""

from __future__ import annotations

from typing import Protocol

from shardwise.kernel.engine.save import SaveReport
from shardwise.ports.hooks import RestoreReport, Run, RunHook


class Writer(Protocol):
    """What is needed of `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object:
        """Add a value of a step."""
        ...


class TensorBoardHook(RunHook):
    """Writes scalars for each save and restore of a `Checkpointer`.

    Example: only rank 0 has a writer.

        writer = SummaryWriter("logs") if rank == 0 else None
        sw.Checkpointer(root, hooks=[partial(TensorBoardHook, writer=writer)])

    The scalars are `shardwise/save/seconds`, `shardwise/save/GB_per_s`, and for each stage
    `shardwise/save/write/seconds` and `shardwise/save/write/seconds_waited`; likewise for
    `snapshot` and `restore`.

    Args:
        run: the run.
        writer: gets the scalars; None: this rank writes none.
    """

    def __init__(self, run: Run, writer: Writer | None = None) -> None:
        self._writer = writer

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """Write the scalars of a save, or of a snapshot that stays in memory."""
        name = "save" if durable else "snapshot"
        self._write(name, report, report.bytes_written)

    def restored(self, report: RestoreReport) -> None:
        """Write the scalars of a restore."""
        self._write("restore", report, report.load.bytes_read)

    def _write(self, name: str, report: SaveReport | RestoreReport, nbytes: int) -> None:
        if self._writer is None:
            return
        record = report.record
        seconds = max(record.ended - record.began, 1e-9)
        values = {"seconds": seconds, "GB_per_s": nbytes / seconds / 1e9}
        for event in record.events:
            for key, value in (("seconds", event.seconds), ("seconds_waited", event.waited)):
                tag = f"{event.stage}/{key}"
                values[tag] = values.get(tag, 0.0) + value
        for tag, value in values.items():
            self._writer.add_scalar(f"shardwise/{name}/{tag}", value, report.step)
