"""The files of a foreign checkpoint: a directory tree, or a single file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError, StoreError
from shardwise.formats.containers.pickle_values import AllowedNames
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import (
    LARGEST_PICKLE,
    MOST_NAMES_SHOWN,
    read_torch_file,
)
from shardwise.manifest.layout import StoredFile
from shardwise.store import FileStatus, ReadableFile, Store, StoreTraits, open_store, store_below
from shardwise.store.store import Buffer

MOST_FILES = 2**20
THREADS = 8
THREADS_FOR_REQUESTS = 32
"""The number of files to read at the same time if each read is a request to another machine."""
LARGEST_KEPT_END = 2**18
MOST_FILES_KEPT = 128
"""The number of files whose first and last bytes are kept from one read to the next."""

Value = TypeVar("Value")


class FileTree:
    """The files below a directory, named by relative paths with `/`, or a single file.

    Links are followed, because caches of published models consist of links. The constructor does
    not access the store. Errors of the store therefore occur later, inside an exchange, which
    reports them on all ranks.

    Args:
        place: the directory or file.
        skip_unknown: leave out objects that are not read from pickles, instead of refusing the
            file.
    """

    def __init__(
        self, place: str | os.PathLike[str] | Store, *, skip_unknown: bool = False
    ) -> None:
        self.store = open_store(place)
        self.skip_unknown = skip_unknown
        self._kept_ends: dict[str, dict[int, Buffer]] = {}

    def __str__(self) -> str:
        return str(self.store)

    @property
    def threads(self) -> int:
        """The number of files to read at the same time."""
        return THREADS_FOR_REQUESTS if self.store.traits.transfer.largest_gap else THREADS

    @property
    def parent(self) -> str:
        """The place one level above, for messages."""
        return str(self.store.parent)

    @cached_property
    def single_file(self) -> str | None:
        """The name of the single file; None for a directory.

        Raises:
            CheckpointNotFoundError: the place does not exist.
        """
        if self.store.is_file():
            return self.store.name
        if not self.store.exists():
            raise CheckpointNotFoundError(f"{self}: no such file or directory: check the path")
        return None

    @cached_property
    def statuses(self) -> dict[str, FileStatus]:
        """The sizes and versions of all files, sorted by name.

        Raises:
            CheckpointNotFoundError: the place does not exist.
            FormatError: the directory contains more than `MOST_FILES` files.
            OSError: a directory cannot be listed.
        """
        try:
            statuses = self.store.walk(MOST_FILES)
        except StoreError as error:
            raise FormatError(str(error)) from error
        if not statuses:
            _ = self.single_file  # raises if the place does not exist
        return statuses

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes of all files in bytes, sorted by name; see `statuses`."""
        return {name: status.size for name, status in self.statuses.items()}

    def subtree(self, name: str) -> FileTree:
        """Return the tree of a file or directory directly below. This makes no request."""
        tree = FileTree(self.store.at(name), skip_unknown=self.skip_unknown)
        is_file = name in self.statuses
        prefix = f"{name}/"
        tree.single_file = name if is_file else None
        tree.statuses = {
            path if is_file else path.removeprefix(prefix): status
            for path, status in self.statuses.items()
            if path == name or path.startswith(prefix)
        }
        return tree

    def label(self, name: str) -> str:
        """Return the place of a file, for messages."""
        return str(self) if self.single_file == name else str(store_below(self.store, name))

    def relative_path(self, label: str) -> str:
        """Return the relative path of a file or directory, given its label."""
        url, mark, options = str(self).partition("?")
        return label.removeprefix(f"{url}/").removesuffix(mark + options)

    def is_named_in(self, message: str) -> bool:
        """Return whether a message names this place or a file below, without options of URLs."""
        return str(self).partition("?")[0] in message

    def file(self, name: str) -> StoredFile:
        """Return a file with its size.

        Raises:
            FormatError: the file does not exist.
        """
        if name not in self.sizes:
            raise FormatError(
                f"{self}: the checkpoint refers to the file {name[:200]!r}, which does not "
                "exist; copy it from a complete copy of the checkpoint"
            )
        return StoredFile(name, self.sizes[name])

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
        size = self.file(name).size
        return self.store.open_below("" if self.single_file is not None else name, size)

    @contextmanager
    def open_range(self, name: str) -> Iterator[FileRange]:
        """Open a file as a range, and close it at the end.

        Raises:
            FormatError: the file does not exist.
        """
        gap = self.store.traits.transfer.largest_gap  # 0 unless each request takes time
        with closing(self.open(name)) as file:
            kept = (
                self._kept_ends.setdefault(name, {})
                if len(self._kept_ends) < MOST_FILES_KEPT
                else {}
            )
            buffered = BufferedEnds(file, min(gap, LARGEST_KEPT_END), kept) if gap else file
            label = self.label(name)
            yield FileRange(buffered, name, 0, file.size, label, is_remote=gap > 0)

    def read_each(
        self, names: Iterable[str], read_file: Callable[[FileRange], Value]
    ) -> dict[str, Value]:
        """Return what a function reads from each file, by name; files are read in parallel.

        Args:
            names: the names of the files.
            read_file: the function, which gets the whole file as a range.

        Raises:
            FormatError: a file does not exist, or the function raises it.
        """

        names = list(names)

        def open_and_read(name: str) -> Value:
            with self.open_range(name) as file_range:
                return read_file(file_range)

        with ThreadPoolExecutor(self.threads, "shardwise-open") as pool:
            return dict(zip(names, pool.map(open_and_read, names), strict=True))

    def load(self, name: str, *, also_allowed: AllowedNames | None = None) -> Any:
        """Return the value in a file of torch.save. No tensor is read, and no code runs.

        Args:
            name: the name of the file.
            also_allowed: names that are allowed in pickles, in addition to torch's.

        Raises:
            FormatError: the file is missing or malformed, or contains objects that are not read
                from pickles.
        """
        with self.open_range(name) as file:
            return self._load(file, also_allowed)

    def load_each(
        self, names: Iterable[str], *, also_allowed: AllowedNames | None = None
    ) -> dict[str, Any]:
        """Return the value in each file of torch.save, by name; see `load`."""
        return self.read_each(names, lambda file: self._load(file, also_allowed))

    def _load(self, file: FileRange, also_allowed: AllowedNames | None) -> Any:
        return read_torch_file(
            file, also_allowed=also_allowed, skip_unknown=self.skip_unknown
        ).value

    def read(self, name: str, *, limit: int = LARGEST_PICKLE) -> bytes:
        """Return the content of a small file.

        Raises:
            FormatError: the file does not exist, or has more than `limit` bytes.
        """
        if self.file(name).size > limit:
            raise FormatError(
                f"{self.label(name)}: the file has {self.sizes[name]} bytes; at most {limit} are "
                "supported: copy the file again from an intact source"
            )
        with self.open_range(name) as file:
            return file.read(0, file.size)


class ForeignFiles:
    """The files of a foreign checkpoint, including the `content` of its layout.

    Attributes:
        tree: the files.
    """

    def __init__(self, tree: FileTree, files: Sequence[StoredFile]) -> None:
        self.tree = tree
        self._contents = {file.name: file.content for file in files if file.content is not None}

    def __str__(self) -> str:
        return str(self.tree)

    @property
    def traits(self) -> StoreTraits:
        """The traits of the store that has the files."""
        return self.tree.store.traits

    def open(self, key: str) -> ReadableFile:
        """Open a file for reading ranges.

        Raises:
            FormatError: the file does not exist.
        """
        content = self._contents.get(key)
        return self.tree.open(key) if content is None else BytesFile(content)


class BufferedEnds:
    """A file whose first and last bytes are read in one request each, and kept.

    Headers, pickles and directories are at the start or at the end of files.

    Args:
        file: the file.
        end_size: the number of bytes to keep of each end.
        kept: the bytes that are kept, by their offset. Several readers of a file can share them.
    """

    def __init__(self, file: ReadableFile, end_size: int, kept: dict[int, Buffer]) -> None:
        self._file = file
        self.size = file.size
        self._ends = (
            ((0, file.size),)
            if file.size <= 2 * end_size
            else ((0, end_size), (file.size - end_size, file.size))
        )
        self._kept_ends = kept

    def read_at(self, offset: int, out: Buffer) -> int:
        """Read bytes from `offset` into `out`; return the number of bytes."""
        stop = min(offset + len(out), self.size)
        for low, high in self._ends:
            if low <= offset and stop <= high:
                if low not in self._kept_ends:
                    buffer = np.empty(high - low, np.uint8)
                    self._kept_ends[low] = buffer[: self._file.read_at(low, buffer)]
                part = self._kept_ends[low][offset - low : stop - low]
                out[: len(part)] = part
                return len(part)
        return self._file.read_at(offset, out)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
