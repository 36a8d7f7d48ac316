"""Checksums of zip archives, which files of torch.save and of DCP consist of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw

WEIGHTS = torch.arange(5000.0).reshape(50, 100)
STATE = {"model": {"w": WEIGHTS, "other": torch.ones(7)}, "epoch": 3}


def as_file(place: Path) -> None:
    place.mkdir()
    torch.save(STATE, place / "one.pt")


def as_bin(place: Path) -> None:
    place.mkdir()
    torch.save(STATE["model"], place / "pytorch_model.bin")


def as_dcp(place: Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=place, no_dist=True)


def exported(to: str) -> Callable[[Path], None]:
    """What we write ourselves; the source is zip archives too."""

    def write(place: Path) -> None:
        as_dcp(place.with_name("source"))
        sw.export(place.with_name("source"), place, to=to)

    return write


def opened(place: Path) -> sw.Checkpoint:
    files = sorted(place.iterdir())
    return sw.open(place if len(files) > 1 or files[0].suffix == ".bin" else files[0])


def flip(place: Path, at: Callable[[bytes], int]) -> None:
    """One bit of the file of the weights."""
    needle = WEIGHTS.numpy().tobytes()
    (path,) = [each for each in place.rglob("*") if each.is_file() and needle in each.read_bytes()]
    content = bytearray(path.read_bytes())
    content[at(bytes(content))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("write", [as_file, as_bin, as_dcp, exported("torch"), exported("dcp")])
@pytest.mark.parametrize("byte", [0, 9_999, 19_999])
def test_a_flipped_bit_is_found(tmp_path: Path, write: Callable[[Path], None], byte: int) -> None:
    place = tmp_path / "saved"
    write(place)
    events: list[str] = []
    checked = opened(place).verify(on_event=lambda event: events.append(event.stage))
    assert checked.bytes_checked >= WEIGHTS.nbytes
    assert (checked.bytes_compared, checked.bytes_unchecked) == (0, 0)
    assert len(events) == 1
    flip(place, lambda content: content.index(WEIGHTS.numpy().tobytes()) + byte)
    with pytest.raises(sw.CorruptionError, match=r"bytes \d+:\d+ are not .* \(.*w\); copy"):
        opened(place).verify()


def test_a_flipped_bit_of_a_pickle_is_found(tmp_path: Path) -> None:
    as_file(tmp_path / "saved")
    flip(tmp_path / "saved", lambda content: content.index(b"epoch") + 4)
    assert opened(tmp_path / "saved")["epocl"] == 3
    with pytest.raises(sw.CorruptionError, match=r"one\.pt: bytes .* are not the bytes that"):
        opened(tmp_path / "saved").verify()


def test_a_checksum_that_was_left_out_is_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        as_file(tmp_path / "saved")
    finally:
        torch.serialization.set_crc32_options(True)
    report = opened(tmp_path / "saved").verify()
    assert (report.bytes_checked, report.bytes_unchecked) == (0, WEIGHTS.nbytes + 7 * 4)


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    as_dcp(tmp_path / "saved")
    found = sw.open(tmp_path / "saved")
    (tmp_path / "saved" / "__0_0.distcp").unlink()
    with pytest.raises(sw.CorruptionError, match="which does not exist"):
        found.verify()
