"""Copies beside a training: what they hold, whom they hold up, and on which streams they go.

The streams here are queues. What is put on one is done when the test says so, in an order that is
the worst for what is tested; so nothing is right by luck.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.boxes import Box
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.engine.tensors import JOINED_BYTES, HostMemory, TensorMemory, TorchMemory
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.manifest.manifest import (
    FileEntry,
    data_file,
    encode_header_entries,
    lay_out_file,
)
from shardwise.kernel.plan.save import PieceTable
from shardwise.kernel.state.local_state import Fragment
from shardwise.kernel.store.store import Buffer
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import read_snapshot
from shardwise.parts.memory.pool import PAGE_SIZE, Pool, rank_owner
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import PendingManifest, RankPart
from shardwise.parts.memory.remote.lost_agents import AgentWatch
from shardwise.parts.memory.trainer import device as device_module
from shardwise.parts.memory.trainer.copying import CopyProgress, Slack
from shardwise.parts.memory.trainer.device import CopyStreams, TorchAccelerator
from shardwise.parts.memory.trainer.slots import Slots
from shardwise.parts.memory.trainer.staging import SnapshotPart, Staging
from shardwise.parts.memory.view import StageState

CARD = torch.device("meta", 0)
OTHER = torch.device("meta", 1)
SIZE = 100_000
BOUND = 10.0


class Event:
    """Happens when a stream comes to it."""

    def __init__(self) -> None:
        self.happened = False


class Stream:
    """A queue of work, done when the test says so."""

    def __init__(self, device: torch.device, name: str) -> None:
        self.device = device
        self.name = name
        self.work: deque[Callable[[], object] | Event] = deque()

    def run(self) -> None:
        """Do all of it, up to an event that has not happened."""
        while self.work:
            first = self.work[0]
            if isinstance(first, Event):
                if not first.happened:
                    return
            else:
                first()
            self.work.popleft()


class Simulated:
    """An accelerator that does nothing by itself."""

    def __init__(self) -> None:
        self.training = {each: Stream(each, "training") for each in (CARD, OTHER)}
        self.own: dict[torch.device, Stream] = {}
        self.locked: dict[int, int] = {}
        self.can_lock = True
        self.asked_to_lock = 0
        self._current = threading.local()

    def new_stream(self, device: torch.device) -> Stream:
        assert device not in self.own, "one for each device"
        self.own[device] = Stream(device, "own")
        return self.own[device]

    def current_stream(self, device: torch.device) -> Stream:
        stream: Stream = getattr(self._current, str(device.index), self.training[device])
        return stream

    def set_stream(self, stream: Stream) -> None:
        setattr(self._current, str(stream.device.index), stream)

    def record_event(self, stream: Stream) -> Event:
        event = Event()
        stream.work.append(lambda: setattr(event, "happened", True))
        return event

    def wait_event(self, stream: Stream, event: Event) -> None:
        stream.work.append(event)

    def synchronize(self, event: Event) -> None:
        deadline = time.monotonic() + BOUND
        while not event.happened:
            assert time.monotonic() < deadline, "nobody ran the stream"
            time.sleep(0.001)

    def lock_pages(self, address: int, nbytes: int, device: torch.device) -> bool:
        self.asked_to_lock += 1
        if self.can_lock:
            self.locked[address] = nbytes
        return self.can_lock

    def unlock_pages(self, address: int, device: torch.device) -> None:
        del self.locked[address]


class SimulatedMemory:
    """Bytes on a simulated device."""

    itemsize = 1
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def __init__(self, accelerator: Simulated, device: torch.device, values: np.ndarray) -> None:
        self.device = device
        self.values = values
        self._accelerator = accelerator

    def read(self, index: tuple[slice, ...], out: np.ndarray, *, wait: bool = True) -> None:
        """Copy on the current stream of this thread."""
        stream = self._accelerator.current_stream(self.device)
        stream.work.append(lambda: np.copyto(out, self.values[index]))
        if wait:
            self._accelerator.synchronize(self._accelerator.record_event(stream))

    def write(self, index: tuple[slice, ...], source: np.ndarray) -> None:
        raise NotImplementedError


class FakeTensor:
    """A tensor whose memory is given, and which is only read through it."""

    nbytes = SIZE

    def __init__(self, memory: TensorMemory) -> None:
        self.memory, self.device = memory, memory.device or torch.device("cpu")
        self.is_cpu = memory.device is None

    def is_contiguous(self) -> bool:
        return False


def content_of(*memories: TensorMemory) -> FileSource:
    """A file of tensors of `SIZE` bytes each."""
    entries = [(f"t{i}", "uint8", (SIZE,), Box((0,), (SIZE,))) for i in range(len(memories))]
    return source_of(memories, lay_out_file("0" * 16, 0, encode_header_entries(entries)))


def source_of(
    memories: Sequence[TensorMemory], file: tuple[bytes, FileEntry] | None = None
) -> FileSource:
    n, box = len(memories), Box((0,), (SIZE,))
    pieces = PieceTable(SIZE * np.arange(n + 1), list(range(n)), [box] * n)
    fragments = [Fragment(box, FakeTensor(memory)) for memory in memories]  # type: ignore[arg-type]
    return FileSource(pieces, fragments, file, b"", lambda tensor: tensor.memory)  # type: ignore[attr-defined]


class OnCard(torch.Tensor):
    """A small tensor on a simulated device: what copies it is work on the current stream."""

    accelerator: Simulated
    device: torch.device
    is_full: bool
    is_cpu = False

    @classmethod
    def make(
        cls, accelerator: Simulated, device: torch.device, values: torch.Tensor, *, is_full: bool
    ) -> OnCard:
        """Put values on a device, where there may be no memory for any more."""
        members = {"accelerator": accelerator, "device": device, "is_full": is_full}
        kind = type("OnCard", (cls,), members)
        found: OnCard = values.as_subclass(kind)
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = cls.accelerator.current_stream(cls.device)
        if func is torch.cat:
            if cls.is_full:
                raise torch.OutOfMemoryError("out of memory")
            parts = [torch.from_numpy(each.numpy()) for each in args[0]]
            joined = torch.empty(sum(map(len, parts)), dtype=parts[0].dtype)
            stream.work.append(lambda: torch.cat(parts, out=joined))
            return joined.as_subclass(cls)
        if func is torch.Tensor.copy_:
            target, source = args[0], torch.from_numpy(args[1].numpy())
            stream.work.append(lambda: target.copy_(source))
            if not (kwargs or {}).get("non_blocking"):
                cls.accelerator.synchronize(cls.accelerator.record_event(stream))
            return target
        return super().__torch_function__(func, types, args, kwargs or {})


class Trial:
    """Staging for one rank, without an agent."""

    def __init__(
        self, directory: Path, *, overlap: bool = True, run: str = "", accelerator: Any = None
    ) -> None:
        self.accelerator = Simulated()
        self.home = home = Home(directory)
        self.run: Run = home.run(run or new_run_id())
        options = sw.Memory(overlap=overlap, dir=str(directory))
        used: Any = accelerator or self.accelerator
        self.staging = Staging(home, self.run, 0, options, used)

    def begin(
        self,
        content: FileSource | None,
        step: int = 1,
        *,
        pending: Callable[[], PendingManifest] | None = None,
        durable: bool = False,
    ) -> CopyProgress:
        """Begin a part that holds this."""
        nothing: Any = None
        save_id = f"{step:016x}"
        if content is not None:
            entry = msgspec.structs.replace(content.entry, name=data_file(0, save_id))
            content.entry = entry
        planned = PlannedSave(
            save_id=save_id,
            request=nothing,
            plan=nothing,
            cached=False,
            fragments=(),
            objects=(),
        )
        part = SnapshotPart(
            place=SnapshotDirectory(self.run, step, save_id),
            planned=planned,
            source=content,
            ring=None,
            pending=pending,
            stages=("commit", "protect", "persist") if durable else ("commit", "protect"),
            epoch=0,
            above=[],
        )
        return self.staging.begin(part)

    def place(self, step: int = 1) -> SnapshotDirectory:
        """The snapshot of a step."""
        return SnapshotDirectory(self.run, step, f"{step:016x}")

    def staged(self, content: FileSource, step: int = 1) -> list[int] | None:
        """The tensors of a step as one byte each; None if there is no file yet."""
        found = list(self.place(step).path.glob("r*.safetensors"))
        if not found:
            return None
        data = found[0].read_bytes()[content.entry.data_at : content.entry.objects_at]
        tensors = [data[at : at + SIZE] for at in range(0, len(data), SIZE)]
        assert all(len(set(each)) == 1 for each in tensors), "a mixture of versions"
        return [each[0] for each in tensors]


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    """Staging in buckets of 4 KiB, beside a training."""
    for name in ("BYTES_AT_ONCE", "BYTES_AT_ONCE_FROM_DEVICES"):
        monkeypatch.setattr(f"shardwise.parts.memory.trainer.copying.{name}", 4096)
    found = Trial(tmp_path)
    yield found
    found.staging.close()
    assert not found.accelerator.locked


@pytest.mark.parametrize("first", ["training", "own"])
@pytest.mark.parametrize("fenced", [True, False])
def test_a_part_is_what_devices_held_at_the_save_and_no_thread_waits(
    trial: Trial, first: str, fenced: bool
) -> None:
    """Work is on the stream already when the save comes; more comes after the fence."""
    accelerator = trial.accelerator
    training = accelerator.training[CARD]
    values = np.zeros(SIZE, np.uint8)
    content = content_of(SimulatedMemory(accelerator, CARD, values))  # type: ignore[arg-type]
    training.work.append(lambda: values.fill(1))
    copying = trial.begin(content)
    assert copying.all_queued.wait(BOUND)
    if fenced:
        trial.staging.fence()
    training.work.append(lambda: values.fill(2))
    own = accelerator.own[CARD]
    for stream in (training, own) if first == "training" else (own, training):
        stream.run()
    if first == "own":  # which could not go on before the training's came to the save
        assert trial.staged(content) is None, "noted before it was copied"
    own.run()
    training.run()
    assert copying.wait(BOUND)
    trial.staging.raise_failure()
    assert trial.staged(content) == [1 if fenced else 2], "without a fence, this tells nothing"
    assert values[0] == 2


def test_devices_and_the_host_are_copied_together(trial: Trial) -> None:
    accelerator = trial.accelerator
    values = [np.full(SIZE, 10 + i, np.uint8) for i in range(3)]
    held = torch.from_numpy(values[1])
    content = content_of(
        SimulatedMemory(accelerator, CARD, values[0]),  # type: ignore[arg-type]
        HostMemory(held),
        SimulatedMemory(accelerator, OTHER, values[2]),  # type: ignore[arg-type]
    )
    for step in (1, 2):
        copying = trial.begin(content, step)
        trial.staging.fence()
        held += 1  # the host's part is copied when the fence is passed
        for each in (CARD, OTHER):
            accelerator.training[each].run()
            accelerator.own[each].run()
        assert copying.wait(BOUND)
        trial.staging.raise_failure()
        assert trial.staged(content, step) == [10, 10 + step, 12]
    assert len(accelerator.locked) == 3, "the slots, each once"


def test_threads_have_their_own_streams_back(trial: Trial) -> None:
    accelerator = trial.accelerator
    streams = CopyStreams(accelerator)  # type: ignore[arg-type]
    streams.begin([CARD, OTHER])
    memory = SimulatedMemory(accelerator, OTHER, np.ones(SIZE, np.uint8))
    content = content_of(memory)  # type: ignore[arg-type]
    low, high = content.entry.data_at, content.entry.objects_at
    streams.make_fill(content, wait=False)(low, high, np.zeros(SIZE, np.uint8))
    assert accelerator.current_stream(CARD) is accelerator.training[CARD]
    assert accelerator.current_stream(OTHER) is accelerator.training[OTHER]
    assert len(accelerator.own[OTHER].work) == 2, "an event to wait for, and a copy"
    assert len(accelerator.own[CARD].work) == 1


@pytest.mark.parametrize("is_full", [False, True], ids=["joined", "no memory to join"])
def test_small_tensors_of_a_device_are_one_transfer(trial: Trial, is_full: bool) -> None:
    """They are joined on the stream that copies them. Large ones are not joined."""
    accelerator = trial.accelerator
    streams = CopyStreams(accelerator)  # type: ignore[arg-type]
    on = [CARD] * 4 + [torch.device("cpu")] * 2 + [OTHER] * 3 + [CARD] * 2
    large = JOINED_BYTES // 4 + 1
    values = [torch.full((large if i == 1 else 3,), float(i)) for i in range(len(on))]
    expected = torch.cat([each + 100 for each in values]).numpy().tobytes()
    tensors = [
        each if device.type == "cpu" else OnCard.make(accelerator, device, each, is_full=is_full)
        for device, each in zip(on, values, strict=True)
    ]
    boxes = [Box((0,), tuple(each.shape)) for each in values]
    ends = np.cumsum([0, *(each.nbytes for each in values)])
    fragments = [*map(Fragment, boxes, tensors)]
    source = FileSource(PieceTable(ends, [*range(len(on))], boxes), fragments)
    assert source.devices == {CARD, OTHER}
    for device in (CARD, OTHER):
        here = [each for each, its in zip(values, on, strict=True) if its == device]
        accelerator.training[device].work.extend(partial(each.add_, 100) for each in here)
    for each, device in zip(values, on, strict=True):
        if device.type == "cpu":
            each += 100
    streams.begin(source.devices)
    out = np.zeros(int(ends[-1]), np.uint8)
    streams.make_fill(source, wait=False)(0, len(out), out)
    copies = {device: len(accelerator.own[device].work) - 1 for device in (CARD, OTHER)}
    # One transfer each for tensor 0, the large one, and each run of small ones, which are joined.
    assert copies == ({CARD: 6, OTHER: 3} if is_full else {CARD: 1 + 1 + 2 + 2, OTHER: 2})
    for streams_of in (accelerator.training, accelerator.own):
        for stream in streams_of.values():
            stream.run()
    assert out.tobytes() == expected


def test_a_fill_that_waits_returns_when_small_tensors_of_a_device_are_copied(trial: Trial) -> None:
    accelerator = trial.accelerator
    tensors = [
        OnCard.make(accelerator, CARD, torch.full((3,), i, dtype=torch.int32), is_full=False)
        for i in range(5)
    ]
    box = Box((0,), (3,))
    fragments = [Fragment(box, each) for each in tensors]
    source = FileSource(PieceTable(12 * np.arange(6), [*range(5)], [box] * 5), fragments)
    out = np.zeros(60, np.uint8)
    copying = threading.Thread(target=source.fill, args=(0, 60, out))
    copying.start()
    while copying.is_alive():
        accelerator.training[CARD].run()
    assert out.view(np.int32).tolist() == [i for i in range(5) for _ in range(3)]


def test_without_devices_nothing_of_an_accelerator_is_touched(trial: Trial) -> None:
    content = content_of(HostMemory(torch.full((SIZE,), 7, dtype=torch.uint8)))
    streams = CopyStreams(trial.accelerator)  # type: ignore[arg-type]
    assert streams.make_fill(content, wait=False) == content.fill
    trial.begin(content)
    trial.staging.fence()
    assert trial.staged(content) == [7]
    assert not trial.accelerator.own
    assert not trial.accelerator.asked_to_lock


def test_without_overlap_it_is_copied_when_save_returns(tmp_path: Path) -> None:
    trial = Trial(tmp_path, overlap=False)
    values = np.full(SIZE, 3, np.uint8)
    memory = SimulatedMemory(trial.accelerator, CARD, values)
    content = content_of(memory)  # type: ignore[arg-type]

    def info() -> None:
        while not done.wait(0.001):
            for stream in (trial.accelerator.training[CARD], *trial.accelerator.own.values()):
                stream.run()

    done = threading.Event()
    running = threading.Thread(target=info)
    running.start()
    try:
        assert trial.begin(content).done.is_set()
        assert trial.staged(content) == [3]
    finally:
        done.set()
        running.join()
        trial.staging.close()


def test_a_device_that_fails_is_told_at_the_next_save_and_fences_pass(trial: Trial) -> None:
    class Failing(SimulatedMemory):
        def read(self, index: tuple[slice, ...], out: np.ndarray, *, wait: bool = True) -> None:
            raise RuntimeError("out of memory")

    memory = Failing(trial.accelerator, CARD, np.zeros(SIZE, np.uint8))
    copying = trial.begin(content_of(memory))  # type: ignore[arg-type]
    deadline = time.monotonic() + BOUND
    while not copying.all_queued.wait(0.01):
        assert time.monotonic() < deadline, "a fence would wait for ever"
        for stream in (trial.accelerator.training[CARD], trial.accelerator.own[CARD]):
            stream.run()
    trial.staging.fence()
    with pytest.raises(sw.StoreError, match=r"staging step 1: .*out of memory"):
        trial.staging.raise_failure()
    trial.staging.raise_failure()


def test_a_copy_is_spread_over_the_slack_and_a_fence_ends_that_at_once(trial: Trial) -> None:
    content = content_of(HostMemory(torch.full((SIZE,), 5, dtype=torch.uint8)))
    assert trial.begin(content, 1).done.wait(BOUND), "the first goes at full speed"
    trial.staging.fence()
    slack = trial.staging._slack
    assert slack is not None
    for _ in range(5):
        slack.add(1000.0, has_waited=False)
    copying = trial.begin(content, 2)
    assert not copying.done.wait(0.3)
    start = time.monotonic()
    trial.staging.fence()
    assert time.monotonic() - start < BOUND
    assert trial.staged(content, 2) == [5]
    assert slack.seconds_to_spread() == 0, "it had to wait, so the next goes at full speed"
    assert trial.begin(content, 3).done.wait(BOUND)


def test_checksums_are_computed_once_no_rank_copies(trial: Trial) -> None:
    """Else agents would be in the way of the ranks that still copy, for whom a training waits."""
    presence = RankLock(trial.run, 0)
    content = content_of(HostMemory(torch.full((SIZE,), 5, dtype=torch.uint8)))
    slack = trial.staging._slack
    assert slack is not None
    for _ in range(5):
        slack.add(1000.0, has_waited=False)
    copying = trial.begin(content, 2)
    place = trial.place(2)
    deadline = time.monotonic() + BOUND
    while not place.has(records.rank_record(0)):
        assert time.monotonic() < deadline, "nobody says that it copies"
        time.sleep(0.001)
    other = data_file(1, f"{2:016x}")
    entry = FileEntry(other, 1, 0, 0, 0, 0, 0)
    staged = RankPart(file=entry, snapshots_to_keep=2, stages=(), epoch=0)
    write_record(place.path / records.rank_record(1), staged)
    (place.path / other).touch()

    def due() -> StageState:
        return read_snapshot(place).state_of("seal")

    assert due() is StageState.WAITING
    copying.wait()
    assert due() is StageState.RUNNING
    presence.release()


def test_closing_waits_for_no_pauses(trial: Trial) -> None:
    slack = trial.staging._slack
    assert slack is not None
    slack.add(1000.0, has_waited=False)
    content = content_of(HostMemory(torch.full((SIZE,), 5, dtype=torch.uint8)))
    copying = trial.begin(content, 2)
    closing = threading.Thread(target=trial.staging.close)
    closing.start()
    closing.join(BOUND)
    assert not closing.is_alive()
    assert copying.done.is_set()


@pytest.mark.parametrize("by", ["hurry", "wait"])
def test_whoever_waits_ends_the_pauses(by: str) -> None:
    slack = Slack()
    slack.add(1000.0, has_waited=False)
    copying = CopyProgress(3, slack)
    seen: list[int] = []
    fill = copying.pace_fill(lambda low, high, out: seen.append(low))

    def copy() -> None:
        for at in range(3):
            fill(at, at + 1, np.zeros(1, np.uint8))
        copying.done.set()

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join(0.2)
    assert seen == [0]
    if by == "hurry":
        copying.hurry()
    else:
        assert copying.wait(BOUND)
    thread.join(BOUND)
    assert seen == [0, 1, 2]
    copying.hurry()
    assert slack.seconds_to_spread() == 0


@pytest.fixture
def slots(tmp_path: Path) -> tuple[Slots, Simulated]:
    """Slots that are page-locked for a device."""
    accelerator = Simulated()
    streams = CopyStreams(accelerator)  # type: ignore[arg-type]
    streams.begin([CARD])
    run = Home(tmp_path).run(new_run_id())
    return Slots(run, rank_owner(0), 1, streams), accelerator


def take_again(slots: Slots, path: Path, nbytes: int, device_bytes: int) -> Buffer:
    """Return the slot to the pool, if it was taken, and take it."""
    slots.give(path)
    slot = slots.take(path, nbytes, device_bytes=device_bytes)
    assert slot is not None
    return slot


def test_slots_are_locked_once_and_unlocked_before_they_are_unmapped(
    slots: tuple[Slots, Simulated], tmp_path: Path
) -> None:
    own, accelerator = slots
    own.prepare(10_000)
    assert not accelerator.locked, "nobody asked"
    own.prepare(10_000, device_bytes=8000)
    for nbytes in (10_000, 9000, 10_000, 9000):
        slot = take_again(own, tmp_path / "taken", nbytes, 8000)
        assert slot.ctypes.data in accelerator.locked
    assert accelerator.asked_to_lock == 1
    own.close()
    assert not accelerator.locked


def test_a_slot_that_was_cut_is_locked_up_to_its_end(
    slots: tuple[Slots, Simulated], tmp_path: Path
) -> None:
    """The state was on the host first. The mapping is longer than the file, which CUDA refuses."""
    own, accelerator = slots
    own.prepare(1_000_000)
    for device_bytes in (0, 10_000):
        slot = take_again(own, tmp_path / "taken", 10_000, device_bytes)
    assert accelerator.locked == {slot.ctypes.data: 3 * PAGE_SIZE}
    own.close()


def test_pages_that_a_file_has_lost_are_not_copied_to(
    slots: tuple[Slots, Simulated], tmp_path: Path
) -> None:
    """A file that was cut and grew has other pages there than those that a device knows."""
    own, accelerator = slots
    own.prepare(50_000, device_bytes=50_000)
    for nbytes, times in ((10_000, 1), (10_100, 1), (50_000, 2), (40_000, 2), (50_000, 3)):
        slot = take_again(own, tmp_path / "taken", nbytes, nbytes)
        assert accelerator.asked_to_lock == times
        assert list(accelerator.locked) == [slot.ctypes.data]
        slot[:] = times
        assert (tmp_path / "taken").read_bytes() == bytes([times]) * nbytes


def test_what_cannot_be_locked_is_asked_for_once(
    slots: tuple[Slots, Simulated], tmp_path: Path
) -> None:
    own, accelerator = slots
    accelerator.can_lock = False
    own.prepare(10_000, device_bytes=10_000)
    assert own.take(tmp_path / "taken", 10_000, device_bytes=10_000) is not None
    assert accelerator.asked_to_lock == 1
    own.close()


@pytest.mark.parametrize("where", [torch.device("cuda", 0), torch.device("xpu", 0)])
def test_memory_that_is_not_locked_is_warned_of_with_its_cost(
    monkeypatch: pytest.MonkeyPatch, where: torch.device
) -> None:
    monkeypatch.setattr(device_module, "_call_cuda", lambda *_: "out of memory")
    with pytest.warns(RuntimeWarning, match=r"4,096 bytes .* page-locked .* several times as long"):
        assert not TorchAccelerator().lock_pages(1 << 20, 4096, where)


class LateEvent(torch.Event):
    """An event that happens when it was asked for three times."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.asked == 3

    def synchronize(self) -> None:
        raise AssertionError("this keeps a core busy")


def test_events_that_cannot_block_a_thread_are_polled() -> None:
    event = LateEvent("cpu")
    TorchAccelerator().synchronize(event)
    assert event.asked == 3


def test_events_of_cuda_block_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """All streams are those of `torch.cuda`, because its events know no others."""
    done: list[str] = []

    class CudaEvent:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: CudaStream) -> None:
            done.append(f"record on {stream.name}")

        def synchronize(self) -> None:
            done.append("synchronize")

    class CudaStream:
        def __init__(self, device: torch.device, priority: int, name: str = "new") -> None:
            assert (device, priority) == (where, 0)
            self.name = name

    where = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", CudaEvent)
    monkeypatch.setattr(torch.cuda, "Stream", CudaStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda of: CudaStream(of, 0, "current"))
    accelerator = TorchAccelerator()
    for stream in (accelerator.new_stream(where), accelerator.current_stream(where)):
        accelerator.synchronize(accelerator.record_event(stream))
    assert done == ["record on new", "synchronize", "record on current", "synchronize"]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.bool,
        torch.int64,
        torch.complex64,
        torch.complex128,
    ],
    ids=str,
)
@pytest.mark.parametrize("wait", [True, False])
def test_memory_of_a_device_is_read_like_that_of_the_host(dtype: torch.dtype, wait: bool) -> None:
    """Whatever its dtype and strides; on the host here, where both can be compared."""
    values = torch.arange(24).reshape(4, 6).to(dtype)
    cases = [values, values.t(), values[1:3, ::2], values[2, 3], values.expand(2, 4, 6)]
    for each in cases:
        index = tuple(slice(0, n) for n in each.shape)
        one, other = TorchMemory(each), HostMemory(each)
        assert (one.dtype, one.itemsize) == (other.dtype, other.itemsize)
        read = [np.zeros(each.shape, one.dtype) for _ in range(2)]
        one.read(index, read[0], wait=wait)
        other.read(index, read[1], wait=wait)
        assert read[0].tobytes() == read[1].tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_part_on_a_cuda_device(tmp_path: Path) -> None:
    trial = Trial(tmp_path, accelerator=TorchAccelerator())
    tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    busy = torch.ones(4096, 4096, device="cuda")
    try:
        for step in range(1, 9):
            for _ in range(20):
                busy = (busy @ busy).clamp(0, 1)
            tensor.fill_(step)
            content = content_of(TorchMemory(tensor))
            copying = trial.begin(content, step)
            trial.staging.fence()
            tensor.fill_(100)
            assert copying.wait(BOUND)
            trial.staging.raise_failure()
            assert trial.staged(content, step) == [step]
            (data,) = trial.place(step).path.glob("*.safetensors")
            Pool(trial.run.free_directory).give(rank_owner(0), data)
    finally:
        trial.staging.close()


class Unreadable(HostMemory):
    """Memory that cannot be copied."""

    def read(self, index: tuple[slice, ...], out: np.ndarray, *, wait: bool = True) -> None:
        raise RuntimeError("out of memory")


def test_what_could_not_be_staged_is_told_to_the_agent(trial: Trial) -> None:
    """Who fails the commit at once, and does not wait for a file that never comes."""
    copying = trial.begin(content_of(Unreadable(torch.zeros(SIZE, dtype=torch.uint8))))
    assert copying.wait(BOUND)
    assert copying.failure == "staging step 1: RuntimeError('out of memory')"
    (part,) = trial.place().parts()
    assert part.failure == copying.failure


def seconds_waited(trial: Trial, place: SnapshotDirectory) -> float:
    """Until an agent watch gives a save up; all of an hour if it does not."""
    now = 0.0
    watch = AgentWatch(trial.home, sw.Memory(wait=60.0), 0, place, lambda: now)
    while now < 3600:
        now += 1
        try:
            watch.check(None)
        except sw.StoreError:
            break
    return now


def test_a_save_that_the_leader_was_never_given_is_not_waited_for(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was killed before it wrote a pending manifest, or had no memory for any record."""
    monkeypatch.setattr(Home, "has_agent", lambda home: True)
    place = trial.place()
    place.path.mkdir(parents=True)
    assert 121 < seconds_waited(trial, place) < 130
    (place.path / records.rank_record(0)).touch()
    assert 600 < seconds_waited(trial, place) < 730
    (place.path / records.PENDING).touch()
    assert seconds_waited(trial, place) == 3600


def test_a_save_whose_directory_is_gone_is_not_waited_for(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was freed, and so many saves after it that nobody knows how it ended."""
    monkeypatch.setattr(Home, "has_agent", lambda home: True)
    assert 121 < seconds_waited(trial, trial.place()) < 130
