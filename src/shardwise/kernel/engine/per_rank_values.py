"""Read the per-rank values of a checkpoint: from the files of those ranks whose values are used."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import overload

import msgspec

from shardwise.kernel.decoding import DECODE_ERRORS
from shardwise.kernel.engine.data_reader import DataReader
from shardwise.kernel.engine.group import Group
from shardwise.kernel.errors import CorruptionError, FormatError
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.state.plain_values import JsonValue
from shardwise.kernel.store import Files


def read_per_rank(
    store: Files, layout: Layout, names: Sequence[str], group: Group, *, verify: bool
) -> dict[str, Sequence[JsonValue]]:
    """Read per-rank values.

    If as many ranks load as have saved, each rank reads only its own values. Otherwise, the value
    of each rank is read when it is asked for. For example, generators of random numbers ask for one
    value, however many ranks have saved.

    Args:
        store, layout: the checkpoint.
        names: the names of the values in the checkpoint; at least one.
        group: the ranks that load.
        verify: check the checksums of the bytes that are read.

    Returns:
        For each name, the value of each rank that saved; None for values not read. Asking for a
        value may raise a `CorruptionError`.

    Raises:
        CorruptionError: bytes differ from the saved bytes, or a rank's values are missing.
    """
    source = _RankFiles(store, layout, names, verify)
    if layout.world_size != group.size:
        return {name: RankValues(source, name) for name in names}
    found: dict[str, Sequence[JsonValue]] = {}
    for name in names:
        values: list[JsonValue] = [None] * layout.world_size
        values[group.rank] = source.values_of(group.rank)[name]
        found[name] = values
    return found


@dataclass(slots=True)
class _RankFiles:
    """The files of a checkpoint, and the values that were read from them, by rank."""

    store: Files
    layout: Layout
    names: Sequence[str]
    verify: bool
    found: dict[int, dict[str, JsonValue]] = field(default_factory=dict)

    def values_of(self, rank: int) -> dict[str, JsonValue]:
        """Return the values of a rank by name. Read its file if this was not done yet."""
        if rank not in self.found:
            self.found[rank] = self._read(rank)
        return self.found[rank]

    def _read(self, rank: int) -> dict[str, JsonValue]:
        file = self.layout.file_of_rank(rank)
        if file is None:
            raise CorruptionError(
                f"{self.store}: the manifest lists no file of rank {rank}, so {self.names[0]} has "
                "no value of this rank; load another checkpoint"
            )
        with closing(DataReader(self.store, file, verify=self.verify)) as reader:
            encoded = reader.read_objects()
        try:
            values = msgspec.json.decode(encoded or b"{}")
        except DECODE_ERRORS as error:
            raise FormatError(
                f"{self.store}: {file.name} has invalid per-rank values: {error}"
                "; copy the file again from an intact source, or load another checkpoint"
            ) from error
        for name in self.names:
            if not isinstance(values, dict) or name not in values:
                raise CorruptionError(
                    f"{self.store}: {file.name} has no value of {name}, which the "
                    "manifest lists; copy the file again from an intact source"
                )
        return {name: values[name] for name in self.names}


class RankValues(Sequence[JsonValue]):
    """The encoded values of one name, one of each rank that saved, read when they are asked for."""

    def __init__(self, source: _RankFiles, name: str) -> None:
        self._source, self._name = source, name

    def __len__(self) -> int:
        return self._source.layout.world_size

    @overload
    def __getitem__(self, index: int) -> JsonValue: ...
    @overload
    def __getitem__(self, index: slice) -> list[JsonValue]: ...
    def __getitem__(self, index: int | slice) -> JsonValue | list[JsonValue]:
        """Return the value of a rank.

        Raises:
            CorruptionError: its bytes differ from the saved bytes, or are missing.
        """
        ranks = range(len(self))[index]
        if isinstance(ranks, range):
            return [self._source.values_of(rank)[self._name] for rank in ranks]
        return self._source.values_of(ranks)[self._name]
