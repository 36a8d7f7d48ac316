"""What every reader of a foreign format returns: a manifest laid over existing files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of a foreign checkpoint: a path below its directory, by `/`, and its size in bytes.

    `content` is given for bytes that lie in no file (a step that is a number in a pickle, which a
    target wants as a tensor): they are read from here.
    """

    name: str
    size: int
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class Laid:
    """Boxes of global tensors over bytes of files.

    `pieces.start` is the byte of a piece's first element, from the start of its file; `stride`
    (`(n, D)`, in elements, 0 where a dimension is padding) says where the others are. A row-major
    piece has its shape's own strides; a transposed one, or a part of a larger array, has others.
    """

    pieces: Pieces
    stride: Int

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def nothing(cls) -> Laid:
        """No piece."""
        none, flat = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        return cls(Pieces(none, none, none, flat, flat), flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign checkpoint: global tensors and plain values, and where their bytes lie.

    Names are those under which `shardwise.save` would have written a state with the keys `model`
    and `optimizer`: `model.<parameter or buffer>`, `optimizer.<parameter>.<key>`, and
    `optimizer.param_groups`; formats that nest names of their own keep these.

    Attributes:
        format: what it is, in words.
        files: what `laid` counts.
        tensors: without pieces; those tied to others have `same_as`.
        laid: covers each element of each stored tensor exactly once.
        replicas: further places that must hold the same bytes as `laid` has.
        replica_names: for each row of `replicas` the name of the stored array that it is part of;
            or empty, if all have the names of their tensors.
        averages: by name, the tensors whose mean it is; these are in `tensors`, hidden from users.
        objects: plain values, encoded by `shardwise.state.objects`.
        left_out: what there is beside, and why it was not taken; one line each.
        absent: files that such a checkpoint usually has, and this one lacks: by the name that what
            is in them would have, as `{"optimizer": "optimizer.pt"}`.
    """

    format: str
    files: tuple[ForeignFile, ...]
    tensors: tuple[TensorEntry, ...]
    laid: Laid
    replicas: Laid = field(default_factory=Laid.nothing)
    replica_names: tuple[str, ...] = ()
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    objects: tuple[ObjectEntry, ...] = ()
    step: int | None = None
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
