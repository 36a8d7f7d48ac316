"""Read the values that differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shardwise.engine.data_reader import DataReader
from shardwise.engine.group import Group
from shardwise.errors import CorruptionError, FormatError
from shardwise.manifest.layout import Layout
from shardwise.state.plain_values import JsonValue
from shardwise.store import Files


def read_per_rank(
    store: Files, layout: Layout, names: Sequence[str], group: Group, *, verify: bool
) -> dict[str, list[JsonValue]]:
    """Read per-rank values.

    If as many ranks load as have saved, each rank reads only its own values.

    Args:
        store, layout: the checkpoint.
        names: the names of the values in the checkpoint.
        group: the ranks that load.
        verify: check the checksums of the bytes that are read.

    Returns:
        For each name, a list with the value of each rank that saved; None for values not read.

    Raises:
        CorruptionError: bytes differ from the saved bytes, or a rank's values are missing.
    """
    world = layout.world_size
    ranks = [group.rank] if world == group.size else range(world)
    files = {file.entry.rank: file for file in layout.files if file.entry is not None}
    found: dict[str, list[JsonValue]] = {name: [None] * world for name in names}
    for rank in ranks if names else ():
        if rank not in files:
            raise CorruptionError(
                f"{store}: the manifest lists no file of rank {rank}, so {names[0]} has no "
                "value of this rank; load another checkpoint"
            )
        reader = DataReader(store, files[rank], verify=verify)
        try:
            values = msgspec.json.decode(reader.read_objects() or b"{}")
        except msgspec.DecodeError as error:
            raise FormatError(
                f"{store}: {files[rank].name} has invalid per-rank values: {error}"
                "; copy the file again from an intact source, or load another checkpoint"
            ) from error
        finally:
            reader.close()
        for name in names:
            if not isinstance(values, dict) or name not in values:
                raise CorruptionError(
                    f"{store}: {files[rank].name} has no value of {name}, which the "
                    "manifest lists; copy the file again from an intact source"
                )
            found[name][rank] = values[name]
    return found
