"""Slots are page-locked, so that copies are fast; without that, copies still work."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.boxes import Box
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.plan.save import PieceTable
from shardwise.kernel.state.local_state import Fragment
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory.home import Home
from shardwise.parts.memory.pool import rank_owner
from shardwise.parts.memory.trainer.copying import BYTES_AT_ONCE
from shardwise.parts.memory.trainer.device import CopyStreams, TorchAccelerator
from shardwise.parts.memory.trainer.slots import Slots
from tests.accelerator.streams import occupy

NBYTES = 1 << 30


@pytest.fixture
def streams(cuda: torch.device) -> CopyStreams:
    streams = CopyStreams(TorchAccelerator())
    streams.begin([cuda])
    return streams


@pytest.fixture
def slots(shm: Path, streams: CopyStreams) -> Iterator[Slots]:
    slots = Slots(Home(shm).run(new_run_id()), rank_owner(0), 1, streams)
    yield slots
    slots.close()


def test_a_slot_is_page_locked_until_it_is_unmapped(slots: Slots, shm: Path) -> None:
    slots.prepare(NBYTES)
    path = shm / "taken"
    slot = slots.take(path, NBYTES)
    assert slot is not None
    assert not torch.from_numpy(slot).is_pinned()
    slots.give(path)
    slot = slots.take(path, NBYTES, device_bytes=NBYTES)
    assert slot is not None
    tensor = torch.from_numpy(slot)
    assert tensor.is_pinned()
    assert tensor[-4096:].is_pinned()
    slots.close()
    assert not tensor.is_pinned()


def test_copies_to_a_slot_are_as_fast_as_to_pinned_memory(
    slots: Slots, shm: Path, cuda: torch.device
) -> None:
    slots.prepare(NBYTES, device_bytes=NBYTES)
    slot = slots.take(shm / "taken", NBYTES, device_bytes=NBYTES)
    assert slot is not None
    source = torch.randint(256, (NBYTES,), dtype=torch.uint8, device=cuda)
    pinned = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)

    def copy(target: torch.Tensor) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for low in range(0, NBYTES, BYTES_AT_ONCE):
            part = slice(low, low + BYTES_AT_ONCE)
            target[part].copy_(source[part], non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    target = torch.from_numpy(slot)
    seconds = {name: min(copy(each) for _ in range(5)) for name, each in
               (("slot", target), ("pinned", pinned))}  # fmt: skip
    print({name: f"{NBYTES / each / 1e9:.1f} GB/s" for name, each in seconds.items()})
    assert torch.equal(target, source.cpu())
    assert seconds["slot"] < 1.25 * seconds["pinned"]


def test_a_thread_that_waits_for_copies_keeps_no_core_busy(
    streams: CopyStreams, cuda: torch.device
) -> None:
    occupy(500)
    streams.begin([cuda])
    streams.record_copies()
    wall, busy = time.perf_counter(), time.thread_time()
    streams.wait_for_copies()
    assert time.perf_counter() - wall > 0.1
    assert time.thread_time() - busy < 0.02


def test_small_tensors_take_little_memory_of_the_device(
    slots: Slots, shm: Path, streams: CopyStreams, cuda: torch.device
) -> None:
    """They are joined there before they are copied, a part at a time."""
    count = 20_000
    whole = torch.randint(256, (count, 1024), dtype=torch.uint8, device=cuda)
    box = Box.whole((256,))
    fragments = [Fragment(box, each.view(torch.float32)) for each in whole]
    pieces = PieceTable(1024 * np.arange(count + 1), [*range(count)], [box] * count)
    source = FileSource(pieces, fragments)
    slots.prepare(count * 1024, device_bytes=count * 1024)
    slot = slots.take(shm / "taken", count * 1024, device_bytes=count * 1024)
    assert slot is not None
    reserved = torch.cuda.memory_reserved(cuda)
    streams.begin([cuda])
    streams.make_fill(source, wait=False)(0, count * 1024, slot)
    streams.record_copies()
    streams.wait_for_copies()
    assert torch.equal(torch.from_numpy(slot), whole.cpu().view(-1))
    assert torch.cuda.memory_reserved(cuda) - reserved <= 4 << 20


def test_memory_that_is_locked_already_is_warned_of_and_leaves_no_error(
    slots: Slots, shm: Path, cuda: torch.device
) -> None:
    """The runtime keeps errors, and a later launch would raise it."""
    slots.prepare(1 << 20, device_bytes=1 << 20)
    slot = slots.take(shm / "taken", 1 << 20, device_bytes=1 << 20)
    assert slot is not None
    accelerator = TorchAccelerator()
    address = int(slot.ctypes.data)
    with pytest.warns(RuntimeWarning, match="could not be page-locked"):
        assert not accelerator.lock_pages(address, 1 << 20, cuda)
    values = torch.arange(1000, device=cuda)
    assert int((values * 2).sum()) == 999000


@pytest.mark.parametrize("overlap", [False, True])
def test_without_page_locks_snapshots_are_the_same(
    overlap: bool, tmp_path: Path, shm: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bool:
        warnings.warn("not page-locked", RuntimeWarning, stacklevel=1)
        return False

    monkeypatch.setattr(TorchAccelerator, "lock_pages", refuse)
    values = torch.randn(5_000_001, device=cuda)
    memory = sw.Memory(dir=str(shm), overlap=overlap)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        with pytest.warns(RuntimeWarning, match="not page-locked"):
            checkpointer.prepare({"x": values})
        for step in range(1, 4):
            values += 1
            expected = values.cpu()
            handle = checkpointer.save(step, {"x": values})
            assert handle is not None
            handle.staged()
            values += 1
            assert torch.equal(sw.open(handle.result().path)["x"].tensor(), expected)


def test_a_run_locks_its_slots_without_a_warning(
    tmp_path: Path, shm: Path, cuda: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    values = torch.randn(1000, 1000, device=cuda)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING, "shardwise"):
        warnings.simplefilter("error", RuntimeWarning)
        memory = sw.Memory(dir=str(shm))
        with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
            assert checkpointer.restore({"x": values}) is None
            for step in range(1, 4):
                checkpointer.save(step, {"x": values})
    assert not caplog.records
