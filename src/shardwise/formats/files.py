"""The files of a foreign checkpoint, and the bytes that lie in none, to read ranges of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.formats.foreign import ForeignFile
from shardwise.formats.tree import Tree
from shardwise.store import ReadableFile
from shardwise.store.store import Buffer


class ForeignFiles:
    """Files below a place, by the names that a manifest laid over them has."""

    def __init__(self, tree: Tree, files: Sequence[ForeignFile]) -> None:
        self._tree = tree
        self._contents = {file.name: file.content for file in files if file.content is not None}

    def __str__(self) -> str:
        return str(self._tree)

    def open(self, key: str) -> ReadableFile:
        """Open a file.

        Raises:
            FormatError: there is none.
        """
        content = self._contents.get(key)
        return self._tree.open(key) if content is None else _Content(content)


class _Content:
    """Bytes, as a file."""

    def __init__(self, content: bytes) -> None:
        self._content = np.frombuffer(content, np.uint8)
        self.size = len(content)

    def read_at(self, offset: int, out: Buffer) -> int:
        part = self._content[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        """Nothing is held."""
