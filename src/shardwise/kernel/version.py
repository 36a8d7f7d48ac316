"""The version of the library, and the digest of its code."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

VERSION = "0.1.0"
CODE = (".py", ".pyc", ".so", ".spec")


@cache
def build() -> str:
    """Return the version with a digest of the code: `0.1.0+95f3a1c07be2d846`.

    Ranks compare it, because two states of the code can have the same version. The first call reads
    the source files of the package, about 3 MB.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, file in sorted(_code_files(files("shardwise"), "")):
        data = file.read_bytes()
        digest.update(f"{name} {len(data)} ".encode() + data)
    return f"{VERSION}+{digest.hexdigest()}"


def _code_files(folder: Traversable, path: str) -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        name = f"{path}/{each.name}"
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _code_files(each, name)
        elif each.name.endswith(CODE):
            yield name, each
