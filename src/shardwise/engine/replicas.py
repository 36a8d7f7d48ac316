"""Whether ranks that should hold the same hold the same."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.tensors import Described
from shardwise.errors import MismatchError
from shardwise.layout import Box
from shardwise.manifest.checksums import crc32
from shardwise.state.leaves import host_array

_Row = tuple[str, tuple[int, ...], tuple[int, ...], int]


def check_replicas(described: Described, group: Group) -> None:
    """Compare checksums of all boxes that several ranks hold.

    Raises:
        MismatchError: some differ; all of them are listed.
    """

    def speak() -> bytes:
        description = described.description
        rows: list[_Row] = [
            (
                description.names[tensor],
                fragment.box.offset,
                fragment.box.shape,
                _crc(fragment.data),
            )
            for tensor, fragment in zip(
                description.tensor.tolist(), described.fragments, strict=True
            )
        ]
        return msgspec.msgpack.encode(rows)

    exchange(group, "comparing replicas", speak, _compare)


def _crc(data: torch.Tensor) -> int:
    array = host_array(data.cpu())
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _compare(said: Sequence[bytes]) -> bytes:
    first: dict[tuple[str, Box], tuple[int, int]] = {}
    problems = []
    for rank, data in enumerate(said):
        for name, offset, shape, crc in msgspec.msgpack.decode(data, type=list[_Row]):
            origin, known = first.setdefault((name, Box(offset, shape)), (rank, crc))
            if known != crc:
                problems.append(f"{name}{Box(offset, shape)}: rank {origin} and rank {rank} differ")
    if problems:
        raise MismatchError("replicas are not equal:", problems)
    return b""
