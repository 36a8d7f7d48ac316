"""Conformance tests for readers: subclass `ReaderSuite` and define its fixtures."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.parts.formats import opening
from shardwise.parts.formats.reader import FileRange, FileTree, Reader
from shardwise.testing.thread_group import ThreadGroup, run_ranks

KEY = "reader-under-test"
ALLOWED = sw.FormatError, sw.CorruptionError, sw.CheckpointNotFoundError
"""What opening or reading a damaged checkpoint may raise."""
MOST_MEMORY = 1 << 26
MOST_SECONDS = 60
EDGE = 40
"""At each end of a file, this many bytes are altered one after the other."""

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Write: TypeAlias = Callable[[Path, Tensors], Path]
"""Writes a checkpoint with these tensors into an empty folder. Returns what to open."""


def reader_of(key: str) -> Reader:
    """Return an installed reader by its key, as in `sw.open(path, format=key)`."""
    return opening.load_readers()[key]


def make_tensors(rows: int = 6) -> dict[str, torch.Tensor]:
    """Return tensors of several dtypes and shapes."""
    random_numbers = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 8, generator=random_numbers)
    return {
        "first.weight": weight,
        "first.bias": weight[:, 0].clone(),
        "second.weight": weight.bfloat16(),
        "second.count": torch.arange(rows * 3).reshape(rows, 3),
    }


class ReaderSuite:
    """The conformance tests of a reader.

    Define a subclass in a test module, with fixtures `reader` and `write`.

    Attributes:
        prefix: precedes the names of tensors when the checkpoint is opened.
    """

    prefix = "model."

    @pytest.fixture
    def reader(self) -> Reader:
        """The reader."""
        raise NotImplementedError("define a fixture `reader`")

    @pytest.fixture
    def write(self) -> Write:
        """A function that writes a checkpoint; see `Write`."""
        raise NotImplementedError("define a fixture `write`")

    @pytest.fixture
    def key(self, reader: Reader) -> Iterator[str]:
        """A key for `format=`, under which the tests open checkpoints with the reader.

        The reader is registered for the test only, so its package need not be installed.
        """
        readers = dict(opening.load_readers())
        known = [key for key, each in readers.items() if each.name == reader.name]
        for key in known:
            del readers[key]
        with mock.patch.object(opening, "load_readers", return_value={**readers, KEY: reader}):
            yield KEY

    @pytest.fixture
    def place(self, write: Write, tmp_path: Path) -> Path:
        """A checkpoint of `make_tensors()`."""
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        return write(folder, make_tensors())

    def test_its_own_checkpoints_are_recognised(self, key: str, place: Path) -> None:
        """No other reader recognises these checkpoints, so a user need not say the format."""
        named = sw.open(place, format=key)
        assert sw.open(place).layout.format == named.layout.format

    def test_no_others_are_recognised(self, reader: Reader, tmp_path: Path) -> None:
        """The reader recognises neither other files nor an empty directory."""
        folder = tmp_path / "others"
        (folder / "logs").mkdir(parents=True)
        assert not reader.recognise(FileTree(folder))
        contents = {
            "notes.txt": b"These are notes.",
            "config.json": b'{"layers": 3}',
            "logs/events.bin": bytes(range(256)) * 9,
            "empty": b"",
        }
        for name, data in contents.items():
            (folder / name).write_bytes(data)
            assert not reader.recognise(FileTree(folder / name)), name
        assert not reader.recognise(FileTree(folder))

    def test_tensors_have_their_names_shapes_and_bytes(self, key: str, place: Path) -> None:
        """Every tensor is there once, and nothing else."""
        checkpoint = sw.open(place, format=key)
        expected = self._named(make_tensors())
        tensors = checkpoint.tensors()
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            read = tensors[name][...]
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(read, tensor), name

    def test_it_loads_under_another_sharding(self, key: str, place: Path) -> None:
        """Three ranks load the rows of each tensor that they hold."""
        expected = self._named(make_tensors())

        def load(group: ThreadGroup) -> dict[str, torch.Tensor]:
            held = {name: tensor.chunk(3)[group.rank] for name, tensor in expected.items()}
            out = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            state = {
                name: sw.Shards(
                    expected[name].shape,
                    rows.dtype,
                    [(_box_of_rows(rows, group.rank * len(rows)), rows)],
                )
                for name, rows in out.items()
            }
            sw.load(place, state, format=key, group=group)
            return out

        ranks = run_ranks(3, load)
        for name, tensor in expected.items():
            assert torch.equal(torch.cat([rank[name] for rank in ranks]), tensor), name

    def test_no_tensor_is_read_before_it_is_needed(
        self, key: str, write: Write, tmp_path: Path
    ) -> None:
        """Opening a checkpoint of 13 MB reads less than a tenth of it."""
        folder = tmp_path / "large"
        folder.mkdir()
        tensors = make_tensors(150_000)
        place = write(folder, tensors)
        with _counted_bytes() as counted:
            sw.open(place, format=key)
        total = sum(tensor.nbytes for tensor in tensors.values())
        assert sum(counted) < total / 10, f"{sum(counted)} of {total} bytes were read"

    def test_a_missing_file_is_named(self, key: str, place: Path, tmp_path: Path) -> None:
        """Without one of its files, a checkpoint is refused, or the rest is read."""
        for name, copy, file in _copies(place, tmp_path / "missing"):
            file.unlink()
            self._check(copy, key, name, may_name_place=True)

    def test_a_truncated_file_is_named(self, key: str, place: Path, tmp_path: Path) -> None:
        """Whatever is opened has the right bytes."""
        for name, copy, file in _copies(place, tmp_path / "short"):
            data = file.read_bytes()
            for size in sorted({0, 1, 9, len(data) // 2, max(0, len(data) - 1)} - {len(data)}):
                file.write_bytes(data[:size])
                self._check(copy, key, name)

    def test_a_damaged_file_raises_nothing_else(
        self, key: str, place: Path, tmp_path: Path
    ) -> None:
        """Neither flipped bits nor huge numbers hang, fill the memory, or raise other errors."""
        for name, copy, file in _copies(place, tmp_path / "damaged"):
            for altered in _alterations(file.read_bytes()):
                file.write_bytes(altered)
                self._check(copy, key, name, bytes_may_differ=True)

    def _named(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return {f"{self.prefix}{name}": tensor for name, tensor in tensors.items()}

    def _check(
        self,
        place: Path,
        key: str,
        file: str,
        *,
        may_name_place: bool = False,
        bytes_may_differ: bool = False,
    ) -> None:
        """Open a damaged checkpoint, and read all tensors. Check the error, or the tensors.

        Args:
            file: the damaged file, which an error must name.
            may_name_place: an error may name the place instead.
            bytes_may_differ: the format may have no checksums, so tensors may differ.
        """
        expected = self._named(make_tensors())

        def read() -> None:
            for name, tensor in sw.open(place, format=key).tensors().items():
                found = tensor[...]
                if not bytes_may_differ:
                    assert torch.equal(found, expected[name]), name

        error = _run(read)
        if error is not None:
            assert isinstance(error, ALLOWED), f"{file}: {error!r}"
            named = file in str(error) or (may_name_place and str(place) in str(error))
            assert named or bytes_may_differ, f"the error does not name {file}: {error}"


def _box_of_rows(rows: torch.Tensor, first: int) -> sw.Box:
    return sw.Box((first, *(0,) * (rows.dim() - 1)), tuple(rows.shape))


@contextmanager
def _counted_bytes() -> Iterator[list[int]]:
    """Count the bytes that readers read."""
    counted: list[int] = []
    read = FileRange.read

    def read_and_count(self: FileRange, offset: int, size: int) -> bytes:
        counted.append(size)
        return read(self, offset, size)

    with mock.patch.object(FileRange, "read", read_and_count):
        yield counted


def _copies(place: Path, folder: Path) -> Iterator[tuple[str, Path, Path]]:
    """Copy a checkpoint for each of its files; yield the file's name, the copy, and the file."""
    files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
    for file in files:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        copy = folder / place.name
        if place.is_file():
            shutil.copy(place, copy)
        else:
            shutil.copytree(place, copy)
        relative = file.relative_to(place)
        yield file.name if place.is_file() else str(relative), copy, copy / relative


def _alterations(data: bytes) -> Iterator[bytes]:
    """Yield versions of a file, each with bytes altered at one position.

    The positions are near the ends, where lengths and headers are, and anywhere else.
    """
    numbers = random.Random(len(data))
    edges = {*range(min(EDGE, len(data))), *range(max(0, len(data) - EDGE), len(data))}
    positions = [*sorted(edges), *(numbers.randrange(len(data)) for _ in range(EDGE) if data)]
    for index, position in enumerate(positions):
        new = [b"\xff" * 7 + b"\x7f", b"\xff\xff\xff\x7f", bytes([data[position] ^ 1 << index % 8])]
        replaced = new[index % 3]
        yield (data[:position] + replaced + data[position + len(replaced) :])[: len(data)]


def _run(function: Callable[[], None]) -> Exception | None:
    """Run a function in limited time and memory; return the error that it raises."""
    errors: list[Exception | None] = []

    def run() -> None:
        try:
            function()
            errors.append(None)
        except Exception as error:
            errors.append(error)

    # Not tracemalloc: it is slow, and other threads can make it crash (CPython issue 128679).
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    before = _resident("VmRSS")
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
    grown = _resident("VmHWM") - before
    assert errors, f"the reader did not return within {MOST_SECONDS} seconds"
    assert grown < MOST_MEMORY, f"the reader used {grown} bytes of memory for a small file"
    return errors[0]


def _resident(field: str) -> int:
    """Return a figure of this process's memory in bytes: `VmRSS` is now, `VmHWM` the peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
