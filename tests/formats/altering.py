"""Alter the pickles in files of torch.save."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
from pathlib import Path

import shardwise as sw


def open_with_altered_pickle(saved: Path, name: str, at: int, byte: int, count: int) -> None:
    """Open a copy of a checkpoint with other bytes in the pickle of one file, or see it refused."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(saved / name) as archive:
        place = Path(folder, "copy")
        shutil.copytree(saved, place)
        with zipfile.ZipFile(place / name, "w") as altered:
            for each in archive.namelist():
                data = bytearray(archive.read(each))
                for i in range(count if each.endswith("data.pkl") else 0):
                    data[(at + 977 * i) % len(data)] = byte
                altered.writestr(each, data)
        with contextlib.suppress(sw.FormatError):
            sw.open(place)
