"""A checkpoint, opened: its manifest read once, and checked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from shardwise.engine.buffers import Arena
from shardwise.engine.datareader import BEYOND, DataReader, is_foreign
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
    """Further places of a checkpoint that must hold the same bytes as its pieces.

    Attributes:
        pieces, stride: as those of `Opened`.
        names: for each row the name of the stored array that it is part of; or empty, if all have
            the names of their tensors.
    """

    pieces: Pieces
    stride: Int
    names: tuple[str, ...] = ()


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Opened:
    """A manifest, checked, with its pieces in columns.

    Attributes:
        stride: of the pieces, in elements, `(n, D)`.
        replicas: further places that must hold the same as the pieces.
        left_out: what a foreign checkpoint has that was not taken, and why; one line each.
        absent: files that a foreign checkpoint lacks, by the name that what is in them would have.
        sums: gives the checksums that the files of a foreign checkpoint have, by file.
        parts: tensors of which several versions are stored, whose mean they are: by their number,
            the numbers that the pieces of these have, which are beyond those of the manifest.
    """

    store: Files
    manifest: Manifest
    pieces: Pieces
    stride: Int
    parts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    replicas: Replicas | None = None
    sums: Callable[[], Iterator[Summed]] | None = None

    @property
    def beyond(self) -> int:
        """How many bytes are read beyond what is asked for."""
        return BEYOND if any(map(is_foreign, self.manifest.files)) else 0

    def largest_reads(self, arena: Arena) -> Int:
        """The longest read of each file that an arena has room for, in bytes.

        Of files that come from afar they are as long as that allows, since each is a request.
        """
        store = self.store if isinstance(self.store, MappedStore) else None
        sizes = [
            arena.read_size if store is None or store.is_mapped(file.name) else arena.chunk
            for file in self.manifest.files
        ]
        return np.array(sizes, np.int64) - (BLOCK if self.beyond else 0)

    def tensors_in(self, file: int, start: int, stop: int) -> list[str]:
        """Names of the tensors that may have bytes in a range of a file, by its number."""
        pieces = self.pieces
        source = self.source()
        extent = ((pieces.shape - 1) * self.stride).sum(axis=1) + 1
        low = pieces.start + source.data_at[pieces.file]
        high = low + extent * source.itemsize[pieces.tensor]
        hit = (pieces.file == file) & (low < stop) & (high > start)
        owners = {part: number for number, parts in self.parts.items() for part in parts}
        tensors = self.manifest.tensors
        names = {tensors[owners.get(i, i)].name for i in set(pieces.tensor[hit].tolist())}
        return [t.name for t in tensors if t.name in names or t.same_as in names]

    def source(self) -> Source:
        """What a plan needs to know of the pieces."""
        files = self.manifest.files
        owners = {part: number for number, parts in self.parts.items() for part in parts}
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
    """The bytes of a manifest.

    Raises:
        CheckpointNotFoundError: there is none.
        FormatError: it is absurdly large.
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
    """A checkpoint by the bytes of its manifest.

    Raises:
        FormatError: it cannot be trusted.
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
        return f"{store} is empty, or is not there: there is no checkpoint{hint}"
    return f"{store} has no {MANIFEST}: there is no checkpoint, or its save was never finished"


def read_per_rank(
    opened: Opened, names: Sequence[str], group: Group, *, verify: bool
) -> dict[str, list[JsonValue]]:
    """Per-rank values: those of all saved ranks, or only this rank's if there are as many ranks.

    Returns:
        By name of the checkpoint, a list indexed by saved rank (None where it was not read).

    Raises:
        CorruptionError: they are not what was saved, or a rank's are not there.
    """
    world = opened.manifest.world_size
    ranks = [group.rank] if world == group.size else range(world)
    files = {file.rank: file for file in opened.manifest.files}
    found: dict[str, list[JsonValue]] = {name: [None] * world for name in names}
    for rank in ranks if names else ():
        if rank not in files:
            raise CorruptionError(f"{opened.store}: there is no file of rank {rank}")
        reader = DataReader(opened.store, files[rank], verify=verify)
        try:
            values = msgspec.json.decode(reader.read_objects() or b"{}")
        except msgspec.DecodeError as error:
            raise FormatError(f"{opened.store}: objects of rank {rank}: {error}") from error
        finally:
            reader.close()
        for name in names:
            if not isinstance(values, dict) or name not in values:
                raise CorruptionError(f"{opened.store}: rank {rank} saved no {name}")
            found[name][rank] = values[name]
    return found
