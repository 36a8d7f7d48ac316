"""Encode the layout of a foreign checkpoint, which rank 0 sends to the other ranks."""

from __future__ import annotations

import zlib

import msgspec
import numpy as np

from shardwise.boxes.table import IntArray
from shardwise.manifest.layout import Layout


def _encode_column(column: object) -> tuple[tuple[int, ...], bytes]:
    """Return the shape of a column of integers, and the compressed differences of its rows."""
    if not isinstance(column, np.ndarray):
        raise NotImplementedError
    rows = column.reshape(len(column), -1).T if column.size else column.reshape(0, 0)
    differences = np.diff(rows, axis=1, prepend=0)
    return column.shape, zlib.compress(differences.tobytes(), 1)


def _decode_column(_: object, encoded: tuple[list[int], bytes]) -> IntArray:
    shape, data = encoded
    differences = np.frombuffer(zlib.decompress(data), np.int64)
    if not len(differences):
        return np.zeros(shape, np.int64)
    rows = differences.reshape(-1, shape[0]).cumsum(axis=1)
    return np.ascontiguousarray(rows.T).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_DECODER = msgspec.msgpack.Decoder(Layout, dec_hook=_decode_column)
"""Made at import, because msgspec 0.22 crashes if two threads prepare a type at the same time."""


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as bytes."""
    return _ENCODER.encode(layout)


def decode_layout(data: bytes) -> Layout:
    """Decode the result of `encode_layout`."""
    return _DECODER.decode(data)
