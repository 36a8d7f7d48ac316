"""Write the files of a target: divided among ranks, resumable, read back and published."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shardwise.convert.journal import Journal
from shardwise.convert.plan import Output, Part, Parts, Sums, Target
from shardwise.convert.stream import MarkedSums, write_output
from shardwise.engine.buffers import Arena, aligned_buffer
from shardwise.engine.compare import check_all
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.opened import Opened
from shardwise.errors import CorruptionError
from shardwise.events import Recorder, size
from shardwise.store import LocalStore
from shardwise.store.store import Buffer

SMALLEST_MEMORY = 16 << 20
LARGEST_READ = 32 << 20
ALIGNMENT = 4096
Compared = Sequence[tuple[Opened, Collection[str] | None]]
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """The result of `export`, `average` or `merge_lora`. Bytes and seconds are this rank's.

    Attributes:
        path: the path of the target.
        files: the number of tensor files of the target, on all ranks.
        bytes_written: the size of the files that this rank wrote.
        resumed: how many of this rank's files an interrupted run had already written.
        left_out: what the target lacks of the source, and why; one line each.
        seconds: the time of each stage (open, write, publish, and verify as far as it did not
            overlap with write), and `total`.
    """

    path: str
    files: int
    bytes_written: int
    resumed: int
    left_out: tuple[str, ...]
    seconds: dict[str, float]

    def __str__(self) -> str:
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        resumed = f"; {self.resumed} written by an earlier run" if self.resumed else ""
        left = f"; left out: {len(self.left_out)}" if self.left_out else ""
        return (
            f"wrote {self.path}: {files}, of which this rank wrote {size(self.bytes_written)}, in "
            f"{self.seconds['total']:.2f} s{resumed}{left}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One export. All ranks of the group run it together and share the files.

    Attributes:
        source: makes the source of the parts, which reads through the given arena.
        compared: checkpoints whose copies of tensors are compared first, with the names of the
            tensors; None for all tensors that are written.
        folder: a directory that is new, empty, or has files of the same export.
        identity: the source and the options; another export is not resumed.
        max_memory: the most host memory that each rank uses, in bytes.
        left_out: what the source itself left out, and why.
    """

    source: Callable[[Arena], Parts]
    compared: Compared
    target: Target
    folder: Path
    identity: str
    max_memory: int
    left_out: tuple[str, ...]
    group: Group
    recorder: Recorder

    def run(self) -> ConversionReport:
        """Write all files, read them back, and publish the files that make them a checkpoint.

        Raises:
            CheckpointExistsError: the folder holds something else, or another process writes there.
            CorruptionError: the source is damaged, or a written file does not read back as written.
            MismatchError: the source stores a tensor several times, and the copies differ.
            RankError: another rank failed. Complete files stay, and the next run resumes.
        """
        written = _names(self.target.outputs)
        for opened, names in self.compared:
            wanted = written if names is None else names
            check_all(opened, wanted, self.max_memory, self.recorder, self.group)
        journal = Journal(self.folder, self.identity)
        mine = _share(self.target.outputs, self.group.size)[self.group.rank]
        resumed: list[str] = []

        def begin(_: list[bytes]) -> bytes:
            held.enter_context(journal.begun())
            return b""

        def publish(said: list[bytes]) -> bytes:
            sums: dict[str, list[int]] = {}
            for each in said:
                sums |= msgspec.msgpack.decode(each, type=dict[str, list[int]])
            with self.recorder.stage("publish"):
                for name, content in self.target.finals(sums).items():
                    store = _below(LocalStore(self.folder), name)
                    store.publish(Path(name).name, content, replace=True)
                journal.end()
            return b""

        with ExitStack() as held:
            exchange(self.group, "starting an export", lambda: b"", begin)
            exchange(self.group, "exporting", lambda: self._write(mine, journal, resumed), publish)
        return ConversionReport(
            path=str(self.folder),
            files=len(self.target.outputs),
            bytes_written=sum(output.size for output in mine),
            resumed=len(resumed),
            left_out=(*self.left_out, *self.target.left_out),
            seconds=self.recorder.seconds(),
        )

    def _write(self, outputs: list[Output], journal: Journal, resumed: list[str]) -> bytes:
        """Write the files that are not complete yet. Returns the checksums of all, encoded."""
        largest = largest_read(self.max_memory)
        source = self.source(Arena(largest))
        done: dict[str, list[int]] = {}
        with self.recorder.stage("plan", 2 * sum(output.size for output in outputs)):
            pass  # announces the total to progress bars
        with ThreadPoolExecutor(1, "shardwise-convert-verify") as behind:
            reading: tuple[Output, Future[None]] | None = None
            for output in outputs:
                sums = journal.sums_of(output)
                if sums is None:
                    with self.recorder.stage("write", output.size):
                        sums = _write(output, source, self.folder, largest)
                        journal.complete(output, sums)
                else:
                    resumed.append(output.name)
                self._wait(reading)
                reading = output, behind.submit(_read_again, output, sums, self.folder, largest)
                done[output.name] = list(sums)
            self._wait(reading)
        return msgspec.msgpack.encode(done)

    def _wait(self, reading: tuple[Output, Future[None]] | None) -> None:
        """Wait until a file is read back, which began while the next one was written."""
        if reading is not None:
            output, job = reading
            with self.recorder.stage("verify", output.size):
                job.result()


def _names(outputs: tuple[Output, ...]) -> set[str]:
    """Return the names of the tensors in outputs."""
    return {part.name for each in outputs for part in each.segments if isinstance(part, Part)}


def largest_read(max_memory: int) -> int:
    """Return how many bytes are read or written at a time. About six times as many are held."""
    return min(LARGEST_READ, max_memory // 8) // ALIGNMENT * ALIGNMENT


def _share(outputs: tuple[Output, ...], ranks: int) -> list[list[Output]]:
    """Divide outputs among ranks by size."""
    shares: list[list[Output]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for output in sorted(outputs, key=lambda each: -each.size):
        rank = loads.index(min(loads))
        shares[rank].append(output)
        loads[rank] += output.size
    return shares


def _write(output: Output, source: Parts, folder: Path, largest: int) -> Sums:
    """Write a file under a temporary name, and rename it when it is durable."""
    store = _below(LocalStore(folder), output.name)
    name = Path(output.name).name
    partial = f"{name}.part"
    store.delete(partial)
    try:
        with closing(store.create(partial, output.size)) as file:
            sums = write_output(output, source, file, largest)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = f"{error.strerror}: free some space, and run the same export again to resume it"
        raise OSError(error.errno, message, str(store.path / name)) from error
    os.replace(store.path / partial, store.path / name)
    store.sync()
    return sums


def _read_again(output: Output, sums: Sums, folder: Path, largest: int) -> None:
    """Read a file back and compare its checksums; one buffer is summed while the other is read.

    Raises:
        CorruptionError: the file differs from what was written.
    """
    found = MarkedSums(output)
    buffers = [aligned_buffer(largest) for _ in range(2)]
    store = _below(LocalStore(folder), output.name)
    with (
        closing(store.open(Path(output.name).name)) as file,
        ThreadPoolExecutor(1, "shardwise-convert-reread") as ahead,
    ):

        def read(low: int) -> Buffer:
            part = buffers[low // largest % 2][: max(0, min(largest, output.size - low))]
            return part[: file.read_at(low, part)]

        coming = ahead.submit(read, 0)
        for low in range(largest, output.size + largest, largest):
            part = coming.result()
            coming = ahead.submit(read, low)
            found.add(part)
    if found.all() != list(sums):
        raise CorruptionError(
            f"{folder / output.name} does not read back as written: remove it, and run the same "
            "export again"
        )


def _below(store: LocalStore, name: str) -> LocalStore:
    """Return the store of the directory that a path is in."""
    for part in Path(name).parts[:-1]:
        store = store.at(part)
    return store
