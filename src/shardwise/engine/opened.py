"""A checkpoint that was opened: its manifest, read once and checked, and its pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.datareader import BEYOND, DataReader
from shardwise.engine.group import Group
from shardwise.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    StoreError,
)
from shardwise.layout import row_major
from shardwise.manifest.checksums import BLOCK, Summed
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.manifest.table import Int, Pieces
from shardwise.manifest.validate import trusted_pieces
from shardwise.plan.load import Source
from shardwise.state.objects import JsonValue
from shardwise.store import Files, MappedStore, Store


@dataclass(frozen=True, slots=True)
class Replicas:
    """Further copies of tensors, which must equal the pieces.

    Attributes:
        pieces, stride: as for `Opened`.
        names: for each row, the name of the stored array; empty if all have their tensors' names.
    """

    pieces: Pieces
    stride: Int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignDetails:
    """What only foreign checkpoints have. Their files do not end in a table of checksums.

    Attributes:
        means: tensors that are the mean of several stored versions: by the tensor's number, the
            numbers of the versions in `Opened.pieces`, which follow those of the manifest.
        missing_files: files that the checkpoint lacks, by the name that their content would have.
        checksums: returns the checksums that formats such as zip archives have, by file.
    """

    means: Mapping[int, tuple[int, ...]]
    missing_files: Mapping[str, str]
    checksums: Callable[[], Iterator[Summed]]


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint: its checked manifest, and its pieces in columns.

    Attributes:
        stride: strides of the pieces in elements, `(n, D)`.
        replicas: further copies of tensors, in a foreign checkpoint or by a specification.
        left_out: parts of the checkpoint that are not loaded, and why; one line each.
        foreign: what only foreign checkpoints have; None for ours.
    """

    store: Files
    manifest: Manifest
    pieces: Pieces
    stride: Int
    replicas: Replicas | None = None
    left_out: tuple[str, ...] = ()
    foreign: ForeignDetails | None = None

    @property
    def means(self) -> Mapping[int, tuple[int, ...]]:
        """Tensors that are the mean of several stored versions; see `ForeignDetails`."""
        return {} if self.foreign is None else self.foreign.means

    @property
    def missing_files(self) -> Mapping[str, str]:
        """Files that a foreign checkpoint lacks; see `ForeignDetails`."""
        return {} if self.foreign is None else self.foreign.missing_files

    @property
    def beyond(self) -> int:
        """How many bytes a read returns beyond those asked for; see `DataReader`."""
        return 0 if self.foreign is None else BEYOND

    def reader(self, number: int, *, verify: bool = True) -> DataReader:
        """Open a data file by its number in the manifest.

        Raises:
            CorruptionError: as for `DataReader`.
        """
        entry, ours = self.manifest.files[number], self.foreign is None
        return DataReader(self.store, entry, verify=verify, has_checksums=ours)

    def largest_reads(self, arena: Arena) -> Int:
        """Return the longest read of each file that an arena has room for, in bytes.

        Reads from other nodes are as long as the arena allows, because each is a request.
        """
        store = self.store if isinstance(self.store, MappedStore) else None
        sizes = [
            arena.read_size if store is None or store.is_mapped(file.name) else arena.chunk
            for file in self.manifest.files
        ]
        return np.array(sizes, np.int64) - (BLOCK if self.beyond else 0)

    def tensors_in(self, file: int, start: int, stop: int) -> list[str]:
        """Return the names of tensors with bytes in a range of the file of this number."""
        pieces = self.pieces
        source = self.source()
        extent = ((pieces.shape - 1) * self.stride).sum(axis=1) + 1
        low = pieces.start + source.data_at[pieces.file]
        high = low + extent * source.itemsize[pieces.tensor]
        hit = (pieces.file == file) & (low < stop) & (high > start)
        owners = {part: number for number, parts in self.means.items() for part in parts}
        tensors = self.manifest.tensors
        names = {tensors[owners.get(i, i)].name for i in set(pieces.tensor[hit].tolist())}
        return [t.name for t in tensors if t.name in names or t.same_as in names]

    def source(self) -> Source:
        """Return the pieces and what is needed to find their bytes, for planning."""
        files = self.manifest.files
        owners = {part: number for number, parts in self.means.items() for part in parts}
        tensors = self.manifest.tensors
        of = [*tensors, *(tensors[owners[part]] for part in sorted(owners))]
        return Source(
            self.pieces,
            self.stride,
            np.array([DTYPES[t.dtype].itemsize for t in of], np.int64),
            np.array([file.data_at for file in files], np.int64),
            np.array([file.checksums_at for file in files], np.int64),
        )


def read_manifest(store: Store) -> bytes:
    """Read the manifest of a checkpoint, as bytes.

    Raises:
        CheckpointNotFoundError: there is none.
        FormatError: it is too large.
    """
    try:
        return store.read(MANIFEST, limit=LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointNotFoundError(_not_found(store)) from None
    except NotADirectoryError:
        raise CheckpointNotFoundError(f"{store} is a file, not a checkpoint") from None
    except StoreError as error:
        raise FormatError(str(error)) from error


def opened_manifest(store: Store, data: bytes) -> Opened:
    """Decode and check a manifest.

    Raises:
        FormatError: it is invalid.
    """
    try:
        manifest = decode_manifest(data)
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error
    pieces = trusted_pieces(store, manifest)
    return Opened(store, manifest, pieces, row_major(pieces.shape))


def _not_found(store: Store) -> str:
    names = store.list()
    if not names:
        hint = ""
        if _HUB_ID.fullmatch(str(store)):
            hint = (
                "; if this is the id of a model on the Hugging Face Hub, download it and give the "
                f"directory, such as huggingface_hub.snapshot_download({str(store)!r})"
            )
        return f"{store} does not exist or is empty: there is no checkpoint{hint}"
    return f"{store} has no {MANIFEST}: there is no checkpoint, or its save has not finished"


def read_per_rank(
    opened: Opened, names: Sequence[str], group: Group, *, verify: bool
) -> dict[str, list[JsonValue]]:
    """Read values of each rank: those of all saved ranks, or this rank's if the count is equal.

    Returns:
        By name in the checkpoint, a list with an entry for each saved rank (None if not read).

    Raises:
        CorruptionError: bytes differ from those that were saved, or a rank's values are missing.
    """
    world = opened.manifest.world_size
    ranks = [group.rank] if world == group.size else range(world)
    files = {file.rank: file for file in opened.manifest.files}
    found: dict[str, list[JsonValue]] = {name: [None] * world for name in names}
    for rank in ranks if names else ():
        if rank not in files:
            raise CorruptionError(f"{opened.store}: the file of rank {rank} is missing")
        reader = DataReader(opened.store, files[rank], verify=verify)
        try:
            values = msgspec.json.decode(reader.read_objects() or b"{}")
        except msgspec.DecodeError as error:
            raise FormatError(f"{opened.store}: invalid values of rank {rank}: {error}") from error
        finally:
            reader.close()
        for name in names:
            if not isinstance(values, dict) or name not in values:
                raise CorruptionError(f"{opened.store}: rank {rank} has not saved {name}")
            found[name][rank] = values[name]
    return found
