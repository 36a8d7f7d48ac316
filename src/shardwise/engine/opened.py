"""An open checkpoint: its checked manifest, and its pieces in columns."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.data_reader import LARGEST_ELEMENT, DataReader
from shardwise.engine.group import Group
from shardwise.errors import (
    CheckpointNotFoundError,
    CorruptionError,
    FormatError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.layout import row_major
from shardwise.manifest.checksums import BLOCK, FileChecksums
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import (
    LARGEST_MANIFEST,
    Manifest,
    TensorEntry,
    decode_manifest,
)
from shardwise.manifest.names import MANIFEST, REMOVED
from shardwise.manifest.pieces import Int, Pieces
from shardwise.manifest.validate import validated_pieces_of
from shardwise.plan.load import PieceLocations
from shardwise.state.plain_values import JsonValue
from shardwise.store import Files, MappedStore, Store


@dataclass(frozen=True, slots=True)
class Replicas:
    """Further copies of tensors, which must equal the copies that loads read.

    Attributes:
        pieces: the copies, each a box of a tensor, in columns of n rows.
        stride: the strides of the copies in elements, `(n, D)`.
        names: the name of the stored array of each copy; empty if the arrays have the names of
            their tensors.
    """

    pieces: Pieces
    stride: Int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignDetails:
    """The properties of a foreign checkpoint that a shardwise checkpoint lacks.

    Attributes:
        averages: the versions of each tensor that is an average of several stored versions. Keys
            are indices of tensors in the manifest. Values are indices in `Opened.pieces.tensor`,
            which continue after the manifest's tensors.
        missing_files: files that the checkpoint lacks, by the name of the tensor or value that
            each would contain.
        checksums: returns the checksums in the files, for example in zip archives.
    """

    averages: Mapping[int, tuple[int, ...]]
    missing_files: Mapping[str, str]
    checksums: Callable[[], Iterator[FileChecksums]]


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Opened:
    """A checkpoint: its checked manifest, and its pieces in columns.

    Attributes:
        store: the files of the checkpoint.
        manifest: the checked manifest.
        pieces: the pieces of all tensors.
        stride: the strides of the pieces in elements, `(n, D)`.
        replicas: further copies of tensors, which some foreign checkpoints have.
        left_out: the parts of the checkpoint that are not loaded, with the reason; one line each.
        foreign: the properties of a foreign checkpoint; None for a shardwise checkpoint.
    """

    store: Files
    manifest: Manifest
    pieces: Pieces
    stride: Int
    replicas: Replicas | None = None
    left_out: tuple[str, ...] = ()
    foreign: ForeignDetails | None = None

    @property
    def averages(self) -> Mapping[int, tuple[int, ...]]:
        """The versions of tensors that are averages; see `ForeignDetails`."""
        return {} if self.foreign is None else self.foreign.averages

    @property
    def missing_files(self) -> Mapping[str, str]:
        """Files that a foreign checkpoint lacks; see `ForeignDetails`."""
        return {} if self.foreign is None else self.foreign.missing_files

    @property
    def bytes_past_end(self) -> int:
        """The number of bytes that a read returns after the requested ones; see `DataReader`."""
        return 0 if self.foreign is None else LARGEST_ELEMENT

    def reader(self, index: int, *, verify: bool = True) -> DataReader:
        """Open a data file.

        Args:
            index: the index of the file in the manifest.
            verify: check the checksum of each block that is read.

        Raises:
            CorruptionError: as for `DataReader`.
        """
        entry, is_shardwise = self.manifest.files[index], self.foreign is None
        return DataReader(self.store, entry, verify=verify, has_checksums=is_shardwise)

    def largest_reads(self, arena: Arena) -> Int:
        """Return the longest read of each file that fits into an arena, in bytes, `(files,)`.

        Each read from another node is a request, so these reads are as long as the arena allows.
        """
        store = self.store if isinstance(self.store, MappedStore) else None
        sizes = [
            arena.read_size if store is None or store.is_mapped(file.name) else arena.buffer_size
            for file in self.manifest.files
        ]
        return np.array(sizes, np.int64) - (BLOCK if self.bytes_past_end else 0)

    def ends_of_reads(self, file: Int, high: Int) -> Int:
        """Return the end of the bytes that each read returns; see `DataReader`.

        Args:
            file, high: the file of each read, and the end of its range.
        """
        sizes = np.array([each.size for each in self.manifest.files], np.int64)
        return high if self.foreign is None else np.minimum(high + LARGEST_ELEMENT, sizes[file])

    def tensors_in(self, file: int, start: int, stop: int) -> list[str]:
        """Return the names of the tensors that have bytes in a range of a file.

        Args:
            file: the index of the file in the manifest.
            start, stop: the range, in bytes.
        """
        pieces = self.pieces
        source = self.source()
        extent = ((pieces.shape - 1) * self.stride).sum(axis=1) + 1
        low = pieces.start + source.data_at[pieces.file]
        high = low + extent * source.itemsize[pieces.tensor]
        is_in_range = (pieces.file == file) & (low < stop) & (high > start)
        average_of = self.average_of_version()
        tensors = self.manifest.tensors
        indices = set(pieces.tensor[is_in_range].tolist())
        names = {tensors[average_of.get(i, i)].name for i in indices}
        return [t.name for t in tensors if t.name in names or t.same_as in names]

    def average_of_version(self) -> dict[int, int]:
        """Map the index of each stored version to the index of the tensor that is their average."""
        return {
            version: average for average, versions in self.averages.items() for version in versions
        }

    def stored_entries(self) -> list[TensorEntry]:
        """Return the entry of each index in `pieces.tensor`: tensors, then versions of averages."""
        average_of, tensors = self.average_of_version(), self.manifest.tensors
        return [*tensors, *(tensors[average_of[version]] for version in sorted(average_of))]

    def source(self) -> PieceLocations:
        """Return the pieces and the positions of their bytes, for planning."""
        files = self.manifest.files
        stored = self.stored_entries()
        return PieceLocations(
            self.pieces,
            self.stride,
            np.array([DTYPES[t.dtype].itemsize for t in stored], np.int64),
            np.array([file.data_at for file in files], np.int64),
            np.array([file.checksums_at for file in files], np.int64),
        )


def read_manifest(store: Store) -> bytes:
    """Read the manifest of a checkpoint, as bytes.

    Raises:
        CheckpointNotFoundError: the store has no manifest.
        FormatError: the manifest is too large, or not a regular file.
        StoreUnavailableError: the storage does not answer, which says nothing about the manifest.
    """
    try:
        return store.read(MANIFEST, limit=LARGEST_MANIFEST)
    except FileNotFoundError:
        raise CheckpointNotFoundError(_describe_missing(store)) from None
    except NotADirectoryError:
        raise CheckpointNotFoundError(
            f"{store} is a file, not a checkpoint: pass the directory of a checkpoint"
        ) from None
    except StoreUnavailableError:
        raise
    except StoreError as error:
        raise FormatError(str(error)) from error


def open_manifest(store: Store, data: bytes) -> Opened:
    """Decode and check the manifest of a shardwise checkpoint.

    Args:
        store: the files of the checkpoint.
        data: the content of the manifest.

    Raises:
        FormatError: the manifest is invalid.
        CorruptionError: see `validated_pieces_of`.
    """
    try:
        manifest = decode_manifest(data)
    except FormatError as error:
        raise FormatError(f"{store}: {error}") from error
    pieces = validated_pieces_of(store, manifest)
    stride = row_major(pieces.shape)
    return Opened(store, manifest, pieces, stride, left_out=manifest.left_out)


def _describe_missing(store: Store) -> str:
    """Return why a store has no checkpoint, for an error message."""
    names = store.list()
    if not names:
        hint, parent = "", store.parent
        if _HUB_ID.fullmatch(str(store)) and (parent is None or not parent.exists()):
            hint = (
                "; if this is the id of a model on the Hugging Face Hub, download it and pass the "
                f"directory, such as huggingface_hub.snapshot_download({str(store)!r})"
            )
        elif parent is not None:
            near = difflib.get_close_matches(store.name, parent.list(), n=3)
            if near:
                hint = f"; did you mean {' or '.join(str(parent.at(name)) for name in near)}?"
            elif not parent.exists():
                hint = (
                    f"; {parent} does not exist either: check the path, and whether its file "
                    "system is mounted on this machine"
                )
        return f"{store} does not exist or is empty: there is no checkpoint{hint}"
    if REMOVED in names:
        return f"{store} was removed by retention or `shardwise rm`: load another step"
    return f"{store} has no {MANIFEST}: there is no checkpoint, or its save has not finished"


def read_per_rank(
    opened: Opened, names: Sequence[str], group: Group, *, verify: bool
) -> dict[str, list[JsonValue]]:
    """Read per-rank values.

    If as many ranks load as have saved, each rank reads only its own values.

    Args:
        opened: the checkpoint.
        names: the names of the values in the checkpoint.
        group: the ranks that load.
        verify: check the checksums of the bytes that are read.

    Returns:
        For each name, a list with the value of each rank that saved; None for values not read.

    Raises:
        CorruptionError: bytes differ from the saved bytes, or a rank's values are missing.
    """
    world = opened.manifest.world_size
    ranks = [group.rank] if world == group.size else range(world)
    files = {file.rank: file for file in opened.manifest.files}
    found: dict[str, list[JsonValue]] = {name: [None] * world for name in names}
    for rank in ranks if names else ():
        if rank not in files:
            raise CorruptionError(
                f"{opened.store}: the manifest lists no file of rank {rank}, so {names[0]} has no "
                "value of this rank; load another checkpoint"
            )
        reader = DataReader(opened.store, files[rank], verify=verify)
        try:
            values = msgspec.json.decode(reader.read_objects() or b"{}")
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{opened.store}: {files[rank].name} has invalid per-rank values: {error}"
                "; copy the file again from an intact source, or load another checkpoint"
            ) from error
        finally:
            reader.close()
        for name in names:
            if not isinstance(values, dict) or name not in values:
                raise CorruptionError(
                    f"{opened.store}: {files[rank].name} has no value of {name}, which the "
                    "manifest lists; copy the file again from an intact source"
                )
            found[name][rank] = values[name]
    return found
