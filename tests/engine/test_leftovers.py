"""Leftovers go; whatever is under way, committed, or nobody's business of ours, stays."""

from __future__ import annotations

import fcntl
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.tools.faulty_store import Fault, FaultyStore

SAVE_ID = "0123456789abcdef"
LOCK = f"saving-{SAVE_ID}.lock"
ORPHANS = [
    f"r00000-{SAVE_ID}.safetensors",
    f"r00001-{SAVE_ID}.safetensors",
    f"r00002-{SAVE_ID}.safetensors.0123abcd.part",
    f"r00002-{SAVE_ID}.safetensors.part",
    ".manifest.json.0123abcd",
]
FOREIGN = ["notes.txt", "model.safetensors", "r0.safetensors", ".hidden"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with files of a crashed save, and with others."""
    place = tmp_path / "it"
    place.mkdir()
    for name in [*ORPHANS, *FOREIGN, LOCK]:
        (place / name).write_bytes(b"x")
    return place


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def save(place: Path, value: float = 1.0) -> set[str]:
    """Save something; its files."""
    before = names(place) if place.exists() else set()
    sw.save(place, {"t": torch.full((3,), value)}, group=sw.SoloGroup())
    return names(place) - before


def test_files_of_a_crashed_save_go_and_others_stay(place: Path) -> None:
    assert set(sw.remove(place)) == set(FOREIGN)
    assert names(place) == set(FOREIGN)


def test_a_save_collects_what_another_left_and_keeps_its_own(place: Path) -> None:
    mine = save(place)
    assert names(place) == {*FOREIGN, *mine}
    assert "manifest.json" in mine
    sw.open(place).verify()


def test_nothing_goes_while_a_save_is_under_way(place: Path) -> None:
    before = names(place)
    with (place / LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(sw.StoreError, match="a save is writing to it"):
            sw.remove(place)
        assert names(place) == before
        mine = save(place)
        assert names(place) == {*before, *mine}
    sw.open(place).verify()


def test_beside_a_manifest_that_cannot_be_read_nothing_goes(place: Path) -> None:
    (place / "manifest.json").write_bytes(b"damaged")
    before = names(place)
    with pytest.raises(sw.CheckpointExistsError):
        save(place)
    assert names(place) == before


def test_an_empty_directory_goes_with_its_leftovers(tmp_path: Path) -> None:
    place = tmp_path / "it"
    place.mkdir()
    (place / ORPHANS[0]).touch()
    assert sw.remove(place) == []
    assert not place.exists()


def test_a_save_that_ends_while_another_collects_keeps_its_files(tmp_path: Path) -> None:
    """The collector has listed its files, and not yet looked whether they are committed."""
    place = tmp_path / "it"
    about_to_publish, listed, saved = (threading.Event() for _ in range(3))

    def pause(operation: str) -> None:
        about_to_publish.set()
        listed.wait(20)

    def let_it_end(operation: str) -> None:
        listed.set()
        saved.wait(20)

    def other() -> None:
        store = FaultyStore(place, Fault(0, pause, verbs=("publish",)))
        sw.save(store, {"t": torch.ones(3)}, group=sw.SoloGroup())
        saved.set()

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(other)
        assert about_to_publish.wait(20)
        fault = Fault(0, let_it_end, verbs=("lock",))
        with suppress(sw.StoreError):
            sw.remove(FaultyStore(place, fault))
        saving.result()
    assert fault.operations
    sw.open(place).verify()


def test_saves_to_one_place_at_once_never_harm_each_other(tmp_path: Path) -> None:
    """Often enough that each step of one has met each of the other."""
    start = threading.Barrier(2)

    def attempt(number: int, value: float) -> str:
        start.wait()
        try:
            sw.save(tmp_path / str(number), {"t": torch.full((3,), value)}, group=sw.SoloGroup())
        except sw.CheckpointExistsError:
            return "exists"
        return "saved"

    with ThreadPoolExecutor(2) as pool:
        for number in range(100):
            ended = list(pool.map(attempt, [number] * 2, [0.0, 1.0]))
            assert sorted(ended) == ["exists", "saved"]
            tensor = sw.open(tmp_path / str(number))["t"]
            assert isinstance(tensor, sw.SavedTensor)
            assert tensor[...].tolist() == [float(ended.index("saved"))] * 3
