"""The files of a foreign checkpoint: a directory tree, or a single file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import LARGEST_PICKLE, MOST_NAMED
from shardwise.formats.foreign import ForeignFile
from shardwise.store import LocalStore, ReadableFile
from shardwise.store.store import Buffer

MOST_FILES = 2**20
THREADS = 8

Value = TypeVar("Value")


class Tree:
    """The files below a directory, named by relative paths with `/`, or a single file.

    Links are followed, because caches of published models consist of links. The constructor does
    not access the file system, so that errors occur inside an exchange, which reports them to all
    ranks.

    Args:
        place: the directory or file.
        opaque: leave out objects that are not read from pickles, instead of refusing the file.
    """

    def __init__(self, place: str | os.PathLike[str], *, opaque: bool = False) -> None:
        self.path = Path(place)
        self.opaque = opaque

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def only(self) -> str | None:
        """The name of the single file; None for a directory.

        Raises:
            CheckpointNotFoundError: the place does not exist.
        """
        if self.path.is_file():
            return self.path.name
        if not self.path.is_dir():
            raise CheckpointNotFoundError(f"{self.path}: no such file or directory")
        return None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of all files in bytes, sorted by name.

        Raises:
            CheckpointNotFoundError: the place does not exist.
            FormatError: there are too many files.
            OSError: a directory cannot be listed.
        """
        if self.only is not None:
            return {self.only: self.path.stat().st_size}
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.path, onerror=_raise):
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    found[path.relative_to(self.path).as_posix()] = path.stat().st_size
            if len(found) > MOST_FILES:
                raise FormatError(
                    f"{self.path}: the directory contains more than the supported {MOST_FILES} "
                    "files; open the directory of one checkpoint"
                )
        return dict(sorted(found.items()))

    def file(self, name: str) -> ForeignFile:
        """Return a file with its size.

        Raises:
            FormatError: the file does not exist.
        """
        if name not in self.sizes:
            raise FormatError(
                f"{self.path}: the checkpoint refers to the file {name[:200]!r}, which does not "
                "exist; copy it from a complete copy of the checkpoint"
            )
        return ForeignFile(name, self.sizes[name])

    def require(self, names: Iterable[str], needed: str) -> None:
        """Check that files exist.

        Args:
            needed: what refers to them, for the message: "the index names".

        Raises:
            FormatError: some files do not exist.
        """
        missing = [name[:200] for name in names if name not in self.sizes]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            raise FormatError(
                f"{self}: of the files that {needed}, {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing: {', '.join(missing[:MOST_NAMED])}"
                f"{more}. Copy them from a complete copy of the checkpoint, or open another"
            )

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading ranges.

        Raises:
            FormatError: the file does not exist.
        """
        self.file(name)
        path = self.path if self.only is not None else self.path / name
        real = path.resolve()
        return LocalStore(real.parent).open(real.name)

    @contextmanager
    def open_range(self, name: str, number: int = 0) -> Iterator[FileRange]:
        """Open a file as a range whose messages name the file, and close it at the end.

        Args:
            number: the number of the file among those of the manifest.

        Raises:
            FormatError: the file does not exist.
        """
        where = f"{self}/{name}" if self.only is None else str(self)
        with closing(self.open(name)) as file:
            yield FileRange.whole(file, number, where)

    def read_each(
        self, numbers: Mapping[str, int], read: Callable[[FileRange], Value]
    ) -> dict[str, Value]:
        """Return what a function reads from each file, by name; files are read in parallel.

        Args:
            numbers: the names of the files, and their numbers among those of the manifest.

        Raises:
            FormatError: a file does not exist, or the function raises it.
        """

        def open_and_read(name: str) -> Value:
            with self.open_range(name, numbers[name]) as part:
                return read(part)

        with ThreadPoolExecutor(THREADS, "shardwise-open") as pool:
            return dict(zip(numbers, pool.map(open_and_read, numbers), strict=True))

    def read(self, name: str, *, limit: int = LARGEST_PICKLE) -> bytes:
        """Return the content of a small file.

        Raises:
            FormatError: the file does not exist, or has more than `limit` bytes.
        """
        if self.file(name).size > limit:
            raise FormatError(
                f"{self.path}/{name}: the file has {self.sizes[name]} bytes, more than the "
                f"supported {limit}"
            )
        path = self.path if self.only is not None else self.path / name
        return path.read_bytes()


def _raise(error: OSError) -> None:
    """Raise an error that `os.walk` would ignore: a directory cannot be listed."""
    raise error


class ForeignFiles:
    """The files of a foreign checkpoint, including those that exist only in memory."""

    def __init__(self, tree: Tree, files: Sequence[ForeignFile]) -> None:
        self._tree = tree
        self._contents = {file.name: file.content for file in files if file.content is not None}

    def __str__(self) -> str:
        return str(self._tree)

    def open(self, key: str) -> ReadableFile:
        """Open a file for reading ranges.

        Raises:
            FormatError: the file does not exist.
        """
        content = self._contents.get(key)
        return self._tree.open(key) if content is None else BytesFile(content)


class BytesFile:
    """Bytes in memory that act as the part of a file from `offset` on."""

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._offset = offset
        self.size = offset + len(data)

    def read_at(self, offset: int, out: Buffer) -> int:
        """Copy bytes from `offset` into `out`; return their number."""
        at = offset - self._offset
        part = self._data[at : at + len(out)]
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Do nothing."""
