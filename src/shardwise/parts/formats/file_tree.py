"""The files of a foreign checkpoint: a directory tree, or a single file."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from shardwise.kernel.errors import CheckpointNotFoundError, FormatError, StoreError
from shardwise.kernel.manifest.checksums import FileChecksums
from shardwise.kernel.manifest.layout import Layout, StoredFile
from shardwise.kernel.store import (
    Files,
    FileStatus,
    ReadableFile,
    Store,
    StoreTraits,
    name_of,
    open_store,
    parent_of,
    resolve_links,
    store_below,
)
from shardwise.kernel.store.store import Buffer
from shardwise.parts.formats.containers.pickle_values import UnknownObject, allow_as_instances
from shardwise.parts.formats.containers.pickles import unpickle
from shardwise.parts.formats.containers.ranges import BufferedEnds, BytesFile, FileRange
from shardwise.parts.formats.containers.safetensors import is_safetensors
from shardwise.parts.formats.containers.torch_files import (
    LARGEST_PICKLE,
    MOST_NAMES_SHOWN,
    ParseCache,
    is_torch_file,
    read_pickle_bytes,
    read_torch_file,
    unpickle_tensor,
)
from shardwise.parts.formats.containers.torch_values import TORCH_NAMES
from shardwise.parts.formats.containers.zip_archive import ZIP_START, read_entry_checksums
from shardwise.parts.formats.foreign import StoredArray, StoredComposite

MOST_FILES = 2**20
THREADS = 8
THREADS_FOR_REQUESTS = 32
"""The number of files to read at the same time if each read is a request to another machine."""
LARGEST_KEPT_END = 2**18
LARGEST_JSON = 2**28
MOST_FILES_KEPT = 128
"""The number of files whose first and last bytes are kept from one read to the next."""

Value = TypeVar("Value")


class FilePart(NamedTuple):
    """A range of bytes of a file.

    Attributes:
        file: the name of the file.
        offset, size: in bytes.
        name: the name of the part, for messages.
    """

    file: str
    offset: int
    size: int
    name: str


class FileTree:
    """The files below a directory, named by relative paths with `/`, or a single file.

    Links are followed, because caches of published models consist of links. The constructor does
    not access the store. Errors of the store therefore occur later, in a round, which reports
    them on all ranks.

    Args:
        place: the directory or file.
        skip_unknown: leave out objects of classes that shardwise does not read, instead of
            refusing the file.
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
        return THREADS_FOR_REQUESTS if self.store.traits.largest_gap else THREADS

    @property
    def name(self) -> str:
        """The name of the directory or file, after links."""
        return name_of(resolve_links(self.store))

    @property
    def parent(self) -> str:
        """The place one level above, for messages."""
        return str(parent_of(self.store))

    @cached_property
    def single_file(self) -> str | None:
        """The name of the single file; None for a directory.

        Raises:
            CheckpointNotFoundError: the place does not exist.
        """
        status = self.store.stat("")
        if status is not None and not status.is_directory:
            return name_of(self.store)
        if status is None and not self.store.list():
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

    def require(self, names: Iterable[str], clause: str) -> None:
        """Check that files exist.

        Args:
            names: the names, which may be endless.
            clause: who needs the files, for the message: "the index names".

        Raises:
            FormatError: some files do not exist, or there are too many names.
        """
        missing = []
        for count, name in enumerate(names):
            if count == MOST_FILES:
                raise FormatError(
                    f"{self}: according to its files, {clause} more than {MOST_FILES} files, "
                    "which is not supported: copy the checkpoint again from an intact source"
                )
            if name not in self.sizes:
                missing.append(name[:200])
        if missing:
            extra = len(missing) - MOST_NAMES_SHOWN
            more = f" and {extra} more" if extra > 0 else ""
            shown = ", ".join(missing[:MOST_NAMES_SHOWN])
            raise FormatError(
                f"{self}: of the files that {clause}, {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing: {shown}"
                f"{more}. Copy them from a complete copy of the checkpoint, or open another one"
            )

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading ranges.

        Raises:
            FormatError: the file does not exist.
        """
        size = self.file(name).size
        file = self.store if self.single_file is not None else store_below(self.store, name)
        return resolve_links(file).open("", size)

    @contextmanager
    def open_range(self, name: str) -> Iterator[FileRange]:
        """Open a file as a range, and close it at the end.

        Raises:
            FormatError: the file does not exist.
        """
        gap = self.store.traits.largest_gap  # 0 unless each request takes time
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

        if len(names) == 1:  # a thread would take longer than many reads
            return {names[0]: open_and_read(names[0])}
        with ThreadPoolExecutor(self.threads, "shardwise-open") as pool:
            return dict(zip(names, pool.map(open_and_read, names), strict=True))

    def read_parts(
        self,
        parts: Sequence[FilePart],
        read_part: Callable[[int, FileRange], Value],
        first_bytes: int,
    ) -> list[Value]:
        """Return what a function reads from each part of files.

        Nearby parts are read in one request, and files in parallel.

        Args:
            parts: the parts.
            read_part: the function, which gets the index of a part, and the part as a range.
            first_bytes: the number of bytes of each part to read ahead.

        Raises:
            FormatError: a file does not exist, a part is outside of its file, or the function
                raises it.
        """
        values: dict[int, Value] = {}
        order = sorted(range(len(parts)), key=lambda i: (parts[i].file, parts[i].offset))

        def read_file(group: tuple[str, list[int]]) -> None:
            with self.open_range(group[0]) as file:
                own = [parts[index] for index in group[1]]
                ranges = [file.subrange(part.offset, part.size, part.name) for part in own]
                heads = file.read_ranges((p.offset, min(p.size, first_bytes)) for p in own)
                for index, part_range, head in zip(group[1], ranges, heads, strict=True):
                    values[index] = read_part(index, part_range.with_data(head))

        groups = [(name, list(group)) for name, group in groupby(order, lambda i: parts[i].file)]
        with ThreadPoolExecutor(self.threads, "shardwise-open") as pool:
            list(pool.map(read_file, groups))
        return [values[index] for index in range(len(parts))]

    def load(self, name: str, *, classes: Iterable[str] = (), kind: type = object) -> Any:
        """Return the value in a file of torch.save. No tensor is read, and no code runs.

        Tensors become `StoredArray`s. Parts of DTensors and ShardedTensors become `StoredPart`s.

        Args:
            name: the name of the file.
            classes: classes whose instances become `PickledInstance`s: "package.module.Class".
            kind: the type that the value must have, for example `dict`.

        Raises:
            FormatError: the file is missing or malformed, has a value of another kind, or contains
                objects of classes that shardwise does not read.
        """
        return self.load_each([name], classes=classes, kind=kind)[name]

    def load_each(
        self,
        names: Iterable[str],
        *,
        classes: Iterable[str] = (),
        kind: type = object,
        skip_unknown: bool | None = None,
        share_equal: bool = False,
    ) -> dict[str, Any]:
        """Return the value in each file of torch.save, by name; see `load`.

        Args:
            classes, kind: as for `load`.
            skip_unknown: leave out objects of classes that shardwise does not read; None for the
                user's choice.
            share_equal: parse equal pickles of several files once. These files then share one
                value, whose arrays name one of them.
        """
        cache = ParseCache() if share_equal else None
        allowed = allow_as_instances(*classes)
        skip = self.skip_unknown if skip_unknown is None else skip_unknown

        def load(file: FileRange) -> Any:
            value = read_torch_file(file, also_allowed=allowed, skip_unknown=skip, cache=cache)
            if isinstance(value, kind):
                return value
            if isinstance(value, UnknownObject):
                raise FormatError(f"{file.label}: {value.reason}")
            raise FormatError(
                f"{file.label}: expected a {kind.__name__}, found {type(value).__name__}: copy the "
                "file again from an intact source"
            )

        return self.read_each(names, load)

    def load_range(self, file: FileRange) -> Any:
        """Return the value in a range that contains a file of torch.save; see `load`."""
        return read_torch_file(file, skip_unknown=self.skip_unknown)

    def load_pickle(self, name: str, *, classes: Iterable[str] = ()) -> Any:
        """Return the value in a file that is a pickle; see `load`.

        The value may refer to its parts so often that a walk through all references would not end
        in practice. So do not walk through it.
        """
        return unpickle(
            self.read(name),
            self.label(name),
            also_allowed={**TORCH_NAMES, **allow_as_instances(*classes)},
            skip_unknown=self.skip_unknown,
            refuse_huge_values=False,
        )[0]

    def unpickle_tensor(
        self, data: bytes, label: str
    ) -> StoredArray | StoredComposite | UnknownObject | None:
        """Return the tensor in a pickle that does not contain the tensor's storage.

        The `start` of the array counts from the start of the storage. The offsets of a tensor that
        wraps others mean nothing. For a tensor of a class that is not known, return an
        `UnknownObject`. For any other value, return None.

        Args:
            data: the pickle.
            label: where the pickle is from, for messages.
        """
        return unpickle_tensor(data, label, skip_unknown=self.skip_unknown)

    def pickle_mentions(self, name: str, *texts: bytes) -> bool:
        """Return whether a file is an archive of torch.save whose pickle has one of the texts."""
        with self.open_range(name) as file:
            try:
                if file.read(0, len(ZIP_START)) != ZIP_START:
                    return False
                pickle = read_pickle_bytes(file)
            except FormatError:
                return False
        return any(text in pickle for text in texts)

    def container_of(self, name: str) -> str:
        """Return "torch.save", "safetensors", or "", by the first bytes of a file."""
        with self.open_range(name) as file:
            head = file.read(0, min(64, file.size))
        if is_torch_file(head):
            return "torch.save"
        return "safetensors" if is_safetensors(head) else ""

    def read_json(self, name: str, kind: type[Value], expected: str) -> Value:
        """Return the content of a JSON file.

        Args:
            name: the name of the file.
            kind: the type that msgspec shall decode.
            expected: what the file should be, for messages: "an index of weights".

        Raises:
            FormatError: the file does not exist, or has another content.
        """
        return self.decode_json(self.read(name, limit=LARGEST_JSON), name, kind, expected)

    def decode_json(self, data: str | bytes, name: str, kind: type[Value], expected: str) -> Value:
        """Return the content of JSON text in a file; see `read_json`."""
        try:
            hashable: Any = kind
            decoded: Value = _json_decoder(hashable).decode(data)
            return decoded
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FormatError(
                f"{self.label(name)}: not {expected}: {error}: copy the file again from an intact "
                "source"
            ) from error

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


@lru_cache(64)
def _json_decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


class ForeignFiles:
    """The files of a foreign checkpoint: those of `tree`, and those with `content` in `files`."""

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


def checksums_of(store: Files, layout: Layout) -> Iterator[FileChecksums]:
    """Yield the checksums in the files of a foreign checkpoint: the CRC-32s of zip archives.

    Yield nothing if the checkpoint is not foreign, and an empty table for a file that is no zip.

    Args:
        store, layout: the checkpoint, as `open_any` returns it.

    Raises:
        FormatError: an archive is malformed or truncated.
    """
    if not isinstance(store, ForeignFiles):
        return
    for name in (file.name for file in layout.files if file.content is None):
        with store.tree.open_range(name) as file:
            rows = []
            if file.read(0, min(len(ZIP_START), file.size)) == ZIP_START:
                entries = read_entry_checksums(file)
                rows = [(start, size, crc) for start, size, crc in entries if crc and size]
        table = np.array(rows, np.int64)
        yield FileChecksums(name, table.reshape(len(table), 3))
