"""Bytes that changed on the way: noticed wherever they lie, and never loaded."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.faults.scenario import assert_values, restored, state_of, step_directory

WORLD = 2
OLD, NEW = 1, 2


@pytest.fixture
def root(place: Path) -> Path:
    """Two committed steps, saved by two ranks, with values of each rank's own."""
    for step, seed in ((1, OLD), (2, NEW)):

        def save(group: ThreadGroup, step: int = step, seed: int = seed) -> None:
            state = state_of(seed, group.rank, WORLD)
            own = {"rank": sw.PerRank(group.rank)}
            sw.save(step_directory(place, step), {**state, **own}, step=step, group=group)

        run_ranks(WORLD, save)
    return place


def entries_of(step: Path) -> list[dict[str, Any]]:
    """The files of a checkpoint, as its manifest describes them."""
    entries = [file.entry for file in sw.open(step).layout.files]
    return [msgspec.structs.asdict(entry) for entry in entries if entry is not None]


def flip(path: Path, at: int, mask: int = 0x10) -> None:
    """Alter one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def load(step: Path) -> dict[str, object]:
    state = state_of(0)
    sw.load(step, {**state, "rank": sw.PerRank(0)})
    return state


PARTS: dict[str, Callable[[dict[str, Any]], tuple[int, int]]] = {
    "length of the header": lambda file: (0, 8),
    "header": lambda file: (8, file["data_at"]),
    "pieces": lambda file: (file["data_at"], file["objects_at"]),
    "objects": lambda file: (file["objects_at"], file["checksums_at"]),
    "checksums": lambda file: (file["checksums_at"], file["size"]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_flipped_byte_is_noticed(root: Path, part: str, rank: int) -> None:
    step = step_directory(root, 2)
    file = entries_of(step)[rank]
    low, high = PARTS[part](file)
    chosen = {low, high - 1, *np.random.default_rng().integers(low, high, 20).tolist()}
    for at in sorted(chosen):
        flip(step / file["name"], at)
        with pytest.raises(sw.CorruptionError, match=file["name"]):
            sw.open(step).verify()
        with pytest.raises(sw.CorruptionError, match=file["name"]):
            load(step)
        flip(step / file["name"], at)
    assert sw.open(step).verify().bytes_checked > 0


def test_a_flipped_byte_of_the_manifest_is_noticed(root: Path) -> None:
    step = step_directory(root, 2)
    size = (step / "manifest.json").stat().st_size
    for at in np.random.default_rng().integers(0, size, 50).tolist():
        flip(step / "manifest.json", at)
        with pytest.raises(sw.FormatError):
            load(step)
        flip(step / "manifest.json", at)


def test_an_error_names_the_file_the_range_and_the_tensor(root: Path) -> None:
    step = step_directory(root, 2)
    file = entries_of(step)[0]
    flip(step / file["name"], file["data_at"] + 100)
    with pytest.raises(sw.CorruptionError) as caught:
        load(step)
    for word in (file["name"], "bytes 0:", "sharded"):
        assert word in str(caught.value)


def test_without_verification_what_is_there_is_read(root: Path) -> None:
    """The flip is real: it is only the checksum that keeps it out."""
    step = step_directory(root, 2)
    file = entries_of(step)[0]
    flip(step / file["name"], file["data_at"])
    state = state_of(0)
    sw.load(step, state, verify=False)
    with pytest.raises(AssertionError):
        assert_values(state, NEW)


def truncate(step: Path) -> None:
    name = entries_of(step)[1]["name"]
    os.truncate(step / name, (step / name).stat().st_size - 1)


def empty(step: Path) -> None:
    os.truncate(step / entries_of(step)[1]["name"], 0)


def extend(step: Path) -> None:
    with (step / entries_of(step)[1]["name"]).open("ab") as file:
        file.write(b"\0")


def remove(step: Path) -> None:
    (step / entries_of(step)[0]["name"]).unlink()


def swap_ranks(step: Path) -> None:
    first, second = (step / file["name"] for file in entries_of(step))
    first.rename(step / "aside")
    second.rename(first)
    (step / "aside").rename(second)


def swap_steps(step: Path) -> None:
    """Of the same size, and itself intact."""
    other = step_directory(step.parent, 1)
    there, here = other / entries_of(other)[0]["name"], step / entries_of(step)[0]["name"]
    assert there.stat().st_size == here.stat().st_size
    shutil.copyfile(there, here)


def zero(step: Path) -> None:
    """Blocks that were never written, as after a crash without a sync."""
    file = entries_of(step)[0]
    path = step / file["name"]
    data = bytearray(path.read_bytes())
    data[file["data_at"] :] = bytes(len(data) - file["data_at"])
    path.write_bytes(data)


def truncate_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", (step / "manifest.json").stat().st_size // 2)


def empty_manifest(step: Path) -> None:
    os.truncate(step / "manifest.json", 0)


def manifest_of_another_step(step: Path) -> None:
    shutil.copyfile(step_directory(step.parent, 1) / "manifest.json", step / "manifest.json")


DAMAGE = [
    truncate,
    empty,
    extend,
    remove,
    swap_ranks,
    swap_steps,
    zero,
    truncate_manifest,
    empty_manifest,
    manifest_of_another_step,
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_passed_over_for_the_step_before(
    root: Path, damage: Callable[[Path], None]
) -> None:
    step = step_directory(root, 2)
    damage(step)
    with pytest.raises(sw.CorruptionError):
        load(step)
    with pytest.raises(sw.CorruptionError):
        sw.open(step).verify()
    found, state = restored(root)
    assert found == 1
    assert_values(state, OLD)


@pytest.mark.parametrize("damage", [truncate, empty, extend])
def test_a_file_of_another_size_is_said_to_be(root: Path, damage: Callable[[Path], None]) -> None:
    step = step_directory(root, 2)
    file = entries_of(step)[1]
    damage(step)
    with pytest.raises(sw.CorruptionError, match=rf"bytes, but {file['size']} were saved"):
        load(step)


def test_a_damaged_step_is_saved_again(root: Path) -> None:
    swap_ranks(step_directory(root, 2))
    state = state_of(0)
    with sw.Checkpointer(root, memory=None) as checkpointer:
        assert checkpointer.restore(state) == 1
        assert checkpointer.last_restore is not None
        ((step, reason),) = checkpointer.last_restore.skipped
        assert step == 2
        assert "r0000" in reason
        checkpointer.save(2, state_of(3))
    found, state = restored(root)
    assert found == 2
    assert_values(state, 3)


def test_where_all_is_damaged_nothing_is_restored(root: Path) -> None:
    for step in (1, 2):
        truncate(step_directory(root, step))
    with pytest.raises(sw.CorruptionError, match="no checkpoint below") as caught:
        restored(root)
    assert "step 1" in str(caught.value)
    assert "step 2" in str(caught.value)


def test_a_missing_file_is_not_counted_as_checked(tmp_path: Path) -> None:
    sw.save(tmp_path, {"x": torch.ones(1000)})
    checkpoint = sw.open(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    file.unlink()
    report = checkpoint.find_damage()
    assert (report.bytes_checked, report.files, report.intact) == (0, 0, False)
    assert "the file is missing" in str(report)


def rewrite_manifest(step: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a manifest, and give it the checksum of the changed text."""
    path = step / "manifest.json"
    body, _, _ = path.read_bytes().rpartition(b'"crc32"')
    changed = change(body)
    path.write_bytes(changed + f'"crc32":{zlib.crc32(changed)}}}\n'.encode())


def swapped(first: bytes, second: bytes) -> Callable[[bytes], bytes]:
    return lambda body: body.replace(first, b"\0").replace(second, first).replace(b"\0", second)


CONTRADICTIONS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "names": (swapped(b'"name":"a"', b'"name":"b"'), "the manifest b (F32"),
    "names of parts": (swapped(b'"name":"c"', b'"name":"d"'), "the manifest d[0:2] (F32"),
    "dtype": (lambda body: body.replace(b'"a","dtype":"float32"', b'"a","dtype":"int32"'), "(I32"),
    "shape": (lambda body: body.replace(b"[2,3]", b"[3,2]"), "a (F32 [2, 3] in bytes"),
    "places": (swapped(b'"start":16,', b'"start":40,'), "in bytes 16:40"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_header_that_contradicts_the_manifest_is_damage(tmp_path: Path, case: str) -> None:
    """The manifest and all checksums are intact: it is the save that was wrong."""

    def save(group: ThreadGroup) -> None:
        parts = [(sw.Box((2 * group.rank,), (2,)), torch.full((2,), float(group.rank)))]
        state: dict[str, Any] = {each: sw.Shards((4,), torch.float32, parts) for each in "cd"}
        if group.rank == 0:
            state |= {"a": torch.ones(2, 3), "b": torch.zeros(2, 3), "empty": torch.zeros(0, 2)}
        sw.save(tmp_path, state, group=group)

    run_ranks(WORLD, save)
    assert sw.open(tmp_path).verify().intact
    change, found = CONTRADICTIONS[case]
    rewrite_manifest(tmp_path, change)
    report = sw.open(tmp_path).find_damage()
    first = report.damage[0]
    assert first.file is not None
    assert first.file.startswith("r00000")
    assert "a header that contradicts the manifest" in str(first)
    assert found in str(first)
    with pytest.raises(sw.CorruptionError, match="contradicts the manifest"):
        sw.open(tmp_path).verify()
