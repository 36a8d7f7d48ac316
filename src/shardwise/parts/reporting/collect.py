"""Find the telemetry of a checkpoint or of a run, and summarize each operation.

A run can have hundreds of operations with thousands of ranks each. So each file is read, summarized
and dropped; the page reads the few that it shows in detail once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.errors import CheckpointNotFoundError, FormatError, StoreError, text_of
from shardwise.kernel.events import format_bytes, format_count
from shardwise.kernel.manifest.manifest import (
    save_id_of_telemetry,
    step_of_directory,
)
from shardwise.kernel.opening import raise_for_missing_root
from shardwise.kernel.store import Store, name_of, parent_of
from shardwise.parts.listing import ListedCheckpoint, list_checkpoints
from shardwise.parts.reporting.stragglers import lower_median
from shardwise.parts.telemetry.files import DIRECTORY, list_operations, read_file
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.words import format_rate, format_seconds

MOST_CHECKPOINTS = 200
MOST_OTHERS = 200
MOST_RECORDS = 1_000_000
"""The most records of ranks that are read, the newest operations first; 50,000 take a second."""
MOST_PROBLEMS = 20
PARTICIPLES = {
    "save": "saved",
    "snapshot": "copied to memory",
    "restore": "restored",
}
SAVES = ("save", "snapshot")
SAVED = ("committed", "damaged")


@dataclass(frozen=True, slots=True)
class Operation:
    """A summary of the telemetry of one operation.

    Attributes:
        operation: `"save"`, `"snapshot"` or `"restore"`.
        step: the step of the checkpoint; None if it has none.
        path: the path or URL of the checkpoint, at the time of the operation.
        started: the time of the start: ISO 8601, in UTC.
        seconds: the duration of the operation on the slowest rank.
        ranks: the number of ranks of the operation.
        missing: the number of ranks that sent no telemetry.
        hosts: the number of hosts.
        medians: by stage, the seconds of the median rank, without waiting.
        bytes: the bytes that all ranks moved, in the stage with the most bytes.
        rates: by stage, the bytes per second of the fastest rank.
        phases: by phase of a recovery, its seconds.
        file: the path or URL of the telemetry file.
    """

    operation: str
    step: int | None
    path: str
    started: str
    seconds: float
    ranks: int
    missing: int
    hosts: int
    medians: Mapping[str, float]
    bytes: int
    rates: Mapping[str, float]
    phases: Mapping[str, float]
    file: str

    @property
    def name(self) -> str:
        """What the operation was: `save of step 100`."""
        return self.operation if self.step is None else f"{self.operation} of step {self.step:,}"

    @property
    def headline(self) -> str:
        """What the operation did, as a sentence: `Step 100 was saved in 38.2 s`."""
        what = "The state" if self.step is None else f"Step {self.step:,}"
        done = PARTICIPLES.get(self.operation, f"processed ({self.operation})")
        return f"{what} was {done} in {format_seconds(self.seconds)}"

    @property
    def amounts(self) -> str:
        """The size of the operation: `64 ranks on 8 hosts, 256 GiB at 6.71 GiB/s`."""
        text = f"{format_count(self.ranks, 'rank')} on {format_count(self.hosts, 'host')}"
        if not self.bytes or not self.seconds:
            return text
        return f"{text}, {format_bytes(self.bytes)} at {format_rate(self.bytes / self.seconds)}"

    @property
    def is_save(self) -> bool:
        """Whether the operation saved a checkpoint or a snapshot."""
        return self.operation in SAVES


@dataclass(frozen=True, slots=True)
class Collected:
    """The operations of a run, and what could not be read.

    Attributes:
        operations: by ascending time of their start.
        main: the index of the operation that the report is about; None if it has no telemetry.
        newer: the step of the run's newest checkpoint, if it is newer than that of `main`, because
            its telemetry cannot be read; None for the report of one checkpoint.
        checkpoints: the checkpoints of the run, by ascending step; empty outside of a run.
        problems: what is damaged or missing, one line each.
        read: reads the telemetry of an operation again.
    """

    operations: tuple[Operation, ...]
    main: int | None
    newer: int | None
    checkpoints: tuple[ListedCheckpoint, ...]
    problems: tuple[str, ...]
    read: Callable[[Operation], Telemetry]


def collect(store: Store) -> Collected:
    """Read the telemetry at a place: that of a checkpoint and of its run, or of a whole run.

    Raises:
        CheckpointNotFoundError: the place has neither checkpoints nor telemetry.
    """
    reader, directory = _Reader(), CheckpointDirectory(store)
    names = directory.names()
    own = _files_of_saves(store, names)
    is_checkpoint = directory.state(names) == "committed" or bool(own)
    root = store if not is_checkpoint else None
    if is_checkpoint and step_of_directory(name_of(store)) is not None:
        root = parent_of(store)
    reader.read_all(own)
    checkpoints = () if root is None else _checkpoints(root, reader)
    if root is not None:
        others = [each for each in checkpoints if not own or each.directory != name_of(store)]
        reader.read_all(_files_in(root, others, reader))
    if not reader.operations and not checkpoints and not is_checkpoint:
        raise_for_missing_root(store)
    reader.note_missing(checkpoints, name_of(store) if is_checkpoint else None)
    operations = tuple(sorted(reader.operations, key=lambda each: each.started))
    here = {str(each) for each in own}
    main = _choose_main([each for each in operations if not is_checkpoint or each.file in here])
    return Collected(
        operations,
        None if main is None else operations.index(main),
        None if is_checkpoint or main is None else _newer_step(checkpoints, main),
        checkpoints,
        tuple(reader.problems),
        reader.read_again,
    )


def _newer_step(checkpoints: Sequence[ListedCheckpoint], main: Operation) -> int | None:
    """Return the step of the newest checkpoint, if it is after that of an operation."""
    steps = [each.step or 0 for each in checkpoints if each.state in SAVED and main.is_save]
    return steps[-1] if steps and steps[-1] > (main.step or 0) else None


def choose_baseline(operations: Sequence[Operation], main: Operation) -> Operation | None:
    """Return the save that a save is compared with, if the user chose none.

    It is the one of median duration among the earlier ones of the same kind, with the same number
    of ranks.
    """
    alike = [
        each
        for each in operations
        if each.started < main.started
        and (each.operation, each.ranks) == (main.operation, main.ranks)
    ]
    alike.sort(key=lambda each: each.seconds)
    return alike[(len(alike) - 1) // 2] if alike and main.is_save else None


def summarize(telemetry: Telemetry, file: str) -> Operation:
    """Return the figures of an operation for lists and charts."""
    rates, medians = {}, {}
    for stage in telemetry.stages:
        own = stage.self_seconds
        if stage.has_run.any():
            medians[stage.name] = lower_median(own)
        ran = stage.has_run & (stage.bytes > 0) & (own > 0)
        if ran.any():
            rates[stage.name] = float((stage.bytes[ran] / own[ran]).max())
    return Operation(
        operation=telemetry.operation,
        step=telemetry.step,
        path=telemetry.path,
        started=telemetry.started,
        seconds=telemetry.seconds,
        ranks=telemetry.world_size,
        missing=telemetry.world_size - len(telemetry.ranks),
        hosts=len(telemetry.hosts),
        medians=medians,
        bytes=telemetry.bytes,
        rates=rates,
        phases=telemetry.phases,
        file=file,
    )


@dataclass(frozen=True, slots=True)
class _File:
    """A telemetry file: in the directory of a checkpoint, or in that of other operations."""

    directory: Store
    name: str

    def __str__(self) -> str:
        return f"{self.directory}/{self.name}"

    def read(self) -> Telemetry | None:
        telemetry = read_file(self.directory, self.name)
        return None if telemetry is None else telemetry.with_arrival()


class _Reader:
    """Reads telemetry files, as many as the bound allows, and notes those that it cannot read."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.problems: list[str] = []
        self._files: dict[str, _File] = {}
        self._records = self._unread = 0

    def read_all(self, files: Iterable[_File]) -> None:
        for file in files:
            if self._records > MOST_RECORDS:
                self._unread += 1
                continue
            try:
                telemetry = file.read()
            except (FormatError, OSError) as error:
                self.note(text_of(error))
                continue
            if telemetry is None:  # retention has just removed it
                continue
            self._records += len(telemetry.ranks)
            self._files[str(file)] = file
            self.operations.append(summarize(telemetry, str(file)))

    def read_again(self, operation: Operation) -> Telemetry:
        """Return the telemetry of an operation.

        Raises:
            FormatError, OSError: it cannot be read any more.
        """
        telemetry = self._files[operation.file].read()
        if telemetry is None:
            raise StoreError(f"{operation.file} was removed while the report was made")
        return telemetry

    def note(self, problem: str) -> None:
        """Keep a problem; after twenty, only that there are more."""
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)
        else:
            self.problems[MOST_PROBLEMS:] = ["there are more problems like these"]

    def note_missing(self, checkpoints: Sequence[ListedCheckpoint], place: str | None) -> None:
        """Note the checkpoints without telemetry.

        Args:
            place: the name of the directory that the report is about; None for a whole run.
        """
        found = {name_of(each.directory) for each in self._files.values()}
        if place is not None and place not in found:
            self.note(
                f"{place} was saved without telemetry, or the file of its telemetry was removed or "
                "is damaged"
            )
        saved = [each for each in checkpoints if each.state in SAVED]
        without = [each for each in saved if each.directory not in {*found, place}]
        if without and not self._unread:
            steps = [f"{each.step:,}" for each in without]
            *first, last = [*steps[:5], f"{len(steps) - 5:,} more"] if len(steps) > 5 else steps
            listed = f"steps {', '.join(first)} and {last}" if first else f"step {last}"
            total = f"{len(without):,} of {format_count(len(saved), 'checkpoint')}"
            self.note(f"no readable telemetry for {total}: {listed}")
        if self._unread:
            files = format_count(self._unread, "older telemetry file")
            self.note(f"{files} not read: together they have too many ranks")


def _checkpoints(root: Store, reader: _Reader) -> tuple[ListedCheckpoint, ...]:
    try:
        return tuple(list_checkpoints(root).checkpoints)
    except CheckpointNotFoundError:
        return ()
    except OSError as error:
        reader.note(f"{root}: the checkpoints cannot be listed: {text_of(error)}")
        return ()


def _files_in(
    root: Store, checkpoints: Sequence[ListedCheckpoint], reader: _Reader
) -> Iterator[_File]:
    """Yield the telemetry files of a run: of each kind, the newest ones first."""
    for each in checkpoints[: -MOST_CHECKPOINTS - 1 : -1]:
        if each.state in SAVED:
            store = root.at(each.directory)
            yield from _files_of_saves(
                store, _listed(CheckpointDirectory(store).names, store, reader)
            )
    names = _listed(lambda: list_operations(root), root, reader)
    for name in names[: -MOST_OTHERS - 1 : -1]:
        yield _File(root.at(DIRECTORY), name)


def _listed(names: Callable[[], list[str]], place: Store, reader: _Reader) -> list[str]:
    """Return names; none, and a problem, if the place cannot be listed."""
    try:
        return names()
    except OSError as error:
        reader.note(f"{place}: {text_of(error)}")
        return []


def _files_of_saves(directory: Store, names: Iterable[str]) -> list[_File]:
    """Return the telemetry files of saves, given the names in a directory."""
    return [_File(directory, name) for name in names if save_id_of_telemetry(name) is not None]


def _choose_main(operations: Sequence[Operation]) -> Operation | None:
    """Return the newest save; without one, the newest operation."""
    saves = [each for each in operations if each.operation == "save"]
    return max(saves or operations, key=lambda each: each.started, default=None)
