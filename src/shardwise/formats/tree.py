"""The files of a foreign checkpoint: a directory and what is below it, or one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from shardwise.errors import CheckpointNotFoundError, FormatError
from shardwise.formats.foreign import ForeignFile
from shardwise.store import LocalStore, ReadableFile
from shardwise.store.store import Buffer

MOST_FILES = 2**20
LARGEST_PICKLE = 2**31
MOST_NAMED = 4


class Tree:
    """Files by their paths below a directory, by `/`. A place that is a file has only itself.

    Links are followed, as caches of published models are made of them; a name never leads out of
    the directory by itself. Nothing is looked at before something is asked for: a rank that does
    not see the place fails where it reads, and where the others hear of it.

    Args:
        opaque: leave out what is not read from pickles in them, instead of refusing.
    """

    def __init__(self, place: str | os.PathLike[str], *, opaque: bool = False) -> None:
        self.path = Path(place)
        self.opaque = opaque

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def only(self) -> str | None:
        """The name of the file that the place is; None of a directory.

        Raises:
            CheckpointNotFoundError: nothing is there.
        """
        if self.path.is_file():
            return self.path.name
        if not self.path.is_dir():
            raise CheckpointNotFoundError(f"{self.path}: there is no such file or directory")
        return None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes in bytes of all files, by name, sorted.

        Raises:
            CheckpointNotFoundError: nothing is there.
            FormatError: there are absurdly many.
            OSError: a directory cannot be listed.
        """
        if self.only is not None:
            return {self.only: self.path.stat().st_size}
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.path, onerror=_raise):
            for name in names:
                path = Path(folder, name)
                if path.is_file():
                    found[path.relative_to(self.path).as_posix()] = path.stat().st_size
            if len(found) > MOST_FILES:
                raise FormatError(f"{self.path} has over {MOST_FILES} files below it")
        return dict(sorted(found.items()))

    def file(self, name: str) -> ForeignFile:
        """What a manifest laid over this file says of it.

        Raises:
            FormatError: there is none; something else names it.
        """
        if name not in self.sizes:
            raise FormatError(f"{self.path} has no file {name[:200]!r}, which it should have")
        return ForeignFile(name, self.sizes[name])

    def require(self, names: Iterable[str], needed: str) -> None:
        """Refuse a place that lacks files.

        Args:
            needed: what says that they should be there, as in "the index names".

        Raises:
            FormatError: some are not there.
        """
        missing = [name[:200] for name in names if name not in self.sizes]
        if missing:
            more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
            raise FormatError(
                f"{self}: of the files that {needed}, {len(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing: {', '.join(missing[:MOST_NAMED])}"
                f"{more}. Copy what is missing from where the checkpoint is whole, or open another"
            )

    def open(self, name: str) -> ReadableFile:
        """Open a file for reading ranges of it.

        Raises:
            FormatError: there is none.
        """
        self.file(name)
        path = self.path if self.only is not None else self.path / name
        real = path.resolve()
        return LocalStore(real.parent).open(real.name)

    def read(self, name: str, *, limit: int = LARGEST_PICKLE) -> bytes:
        """All of a small file.

        Raises:
            FormatError: there is none, or it is larger than `limit` bytes.
        """
        if self.file(name).size > limit:
            raise FormatError(f"{self.path}/{name} has {self.sizes[name]} bytes; at most {limit}")
        path = self.path if self.only is not None else self.path / name
        return path.read_bytes()


def _raise(error: OSError) -> None:
    """A directory that cannot be listed is not an empty one."""
    raise error


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
