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
from shardwise.formats.containers.torch_files import LARGEST_PICKLE, MOST_NAMES_SHOWN
from shardwise.formats.foreign import ForeignFile
from shardwise.store import LocalStore, ReadableFile
from shardwise.store.store import Buffer

MOST_FILES = 2**20
THREADS = 8

Value = TypeVar("Value")


class FileTree:
    """The files below a directory, named by relative paths with `/`, or a single file.

    Links are followed, because caches of published models consist of links. The constructor does
    not access the file system. Errors therefore occur inside an exchange, which reports them on all
    ranks.

    Args:
        path: the directory or file.
        skip_unknown: leave out objects that are not read from pickles, instead of refusing the
            file.
    """

    def __init__(self, path: str | os.PathLike[str], *, skip_unknown: bool = False) -> None:
        self.path = Path(path)
        self.skip_unknown = skip_unknown

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def single_file(self) -> str | None:
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
            FormatError: the directory contains more than `MOST_FILES` files.
            OSError: a directory cannot be listed.
        """
        if self.single_file is not None:
            return {self.single_file: self.path.stat().st_size}
        sizes: dict[str, int] = {}
        for folder, _, names in os.walk(self.path, onerror=_raise_error):
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    sizes[path.relative_to(self.path).as_posix()] = path.stat().st_size
            if len(sizes) > MOST_FILES:
                raise FormatError(
                    f"{self.path}: the directory contains more than the supported {MOST_FILES} "
                    "files; open the directory of one checkpoint"
                )
        return dict(sorted(sizes.items()))

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

    def require(self, names: Iterable[str], needed_by: str) -> None:
        """Check that files exist.

        Args:
            needed_by: a phrase for the message: "the index names".

        Raises:
            FormatError: some files do not exist.
        """
        missing = [name[:200] for name in names if name not in self.sizes]
        if missing:
            more = (
                f" and {len(missing) - MOST_NAMES_SHOWN} more"
                if len(missing) > MOST_NAMES_SHOWN
                else ""
            )
            shown = ", ".join(missing[:MOST_NAMES_SHOWN])
            raise FormatError(
                f"{self}: of the files that {needed_by}, {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing: {shown}"
                f"{more}. Copy them from a complete copy of the checkpoint, or open another one"
            )

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading ranges.

        Raises:
            FormatError: the file does not exist.
        """
        self.file(name)
        path = self.path if self.single_file is not None else self.path / name
        target = path.resolve()
        return LocalStore(target.parent).open(target.name)

    @contextmanager
    def open_range(self, name: str, file_index: int = 0) -> Iterator[FileRange]:
        """Open a file as a range, and close it at the end.

        Args:
            name: the name of the file.
            file_index: the index of the file in `Foreign.files`.

        Raises:
            FormatError: the file does not exist.
        """
        label = f"{self}/{name}" if self.single_file is None else str(self)
        with closing(self.open(name)) as file:
            yield FileRange.whole(file, file_index, label)

    def read_each(
        self, file_indices: Mapping[str, int], read: Callable[[FileRange], Value]
    ) -> dict[str, Value]:
        """Return what a function reads from each file, by name; files are read in parallel.

        Args:
            file_indices: the names of the files, and their indices in `Foreign.files`.
            read: the function, which gets the whole file as a range.

        Raises:
            FormatError: a file does not exist, or the function raises it.
        """

        def open_and_read(name: str) -> Value:
            with self.open_range(name, file_indices[name]) as file_range:
                return read(file_range)

        with ThreadPoolExecutor(THREADS, "shardwise-open") as pool:
            return dict(zip(file_indices, pool.map(open_and_read, file_indices), strict=True))

    def read(self, name: str, *, limit: int = LARGEST_PICKLE) -> bytes:
        """Return the content of a small file.

        Raises:
            FormatError: the file does not exist, or has more than `limit` bytes.
        """
        if self.file(name).size > limit:
            raise FormatError(
                f"{self.path}/{name}: the file has {self.sizes[name]} bytes; at most {limit} are "
                "supported"
            )
        path = self.path if self.single_file is not None else self.path / name
        return path.read_bytes()


def _raise_error(error: OSError) -> None:
    """Raise the error of a directory that cannot be listed, which `os.walk` ignores by default."""
    raise error


class ForeignFiles:
    """The files of a foreign checkpoint, including those whose content is in the manifest."""

    def __init__(self, tree: FileTree, files: Sequence[ForeignFile]) -> None:
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
    """Bytes in memory, as the part of a file that starts at `offset`."""

    def __init__(self, data: bytes, offset: int = 0) -> None:
        self._data = np.frombuffer(data, np.uint8)
        self._offset = offset
        self.size = offset + len(data)

    def read_at(self, offset: int, out: Buffer) -> int:
        """Copy bytes of the file from `offset` into `out`; return the number of bytes."""
        start = offset - self._offset
        data = self._data[start : start + len(out)]
        out[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Do nothing."""
