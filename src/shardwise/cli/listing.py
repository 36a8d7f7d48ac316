"""What each directory below a root holds, as far as can be seen without reading all of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from shardwise.cli import wording
from shardwise.cli.places import Below, read_manifest
from shardwise.errors import FormatError
from shardwise.manifest.manifest import FileEntry
from shardwise.store import Store

State = Literal["committed", "damaged", "unfinished"]
THREADS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A directory below a root. What only a manifest says is None if there is none to read."""

    directory: str
    step: int | None
    state: State
    problem: str | None = None
    saved_at: str | None = None
    tensors: int | None = None
    bytes: int | None = None
    files: int | None = None
    world_size: int | None = None
    metrics: dict[str, float | None] | None = None


def listed(below: Below) -> Listed:
    """Look at a directory: at its manifest, and at the sizes of the files that it names."""
    step = below.step
    if not below.committed:
        return Listed(directory=below.name, step=step, state="unfinished")
    try:
        saved = read_manifest(below.store)
    except FormatError as error:
        return Listed(directory=below.name, step=step, state="damaged", problem=str(error))
    manifest = saved.manifest
    problems = list(_problems(below, manifest.files))
    return Listed(
        directory=below.name,
        step=manifest.step if step is None else step,
        state="damaged" if problems else "committed",
        problem=f"{below.store}: {'; '.join(problems)}" if problems else None,
        saved_at=manifest.created,
        tensors=len(manifest.tensors),
        bytes=saved.bytes,
        files=len(manifest.files),
        world_size=manifest.world_size,
        metrics=manifest.metrics,
    )


def _problems(below: Below, files: tuple[FileEntry, ...]) -> Iterator[str]:
    missing = [file.name for file in files if file.name not in below.files]
    if missing:
        yield f"{wording.count(len(missing), 'file')} missing: {wording.listed(missing)}"
    present = [file for file in files if file.name in below.files]
    with ThreadPoolExecutor(THREADS, "shardwise-ls") as pool:
        found = [each for each in pool.map(partial(_problem, below.store), present) if each]
    yield from found[:3]
    if len(found) > 3:
        yield f"{len(found) - 3:,} more files with problems"


def _problem(store: Store, file: FileEntry) -> str | None:
    """What is wrong with a file, as far as its size says."""
    try:
        reader = store.open(file.name)
    except OSError as error:
        return f"{file.name} cannot be opened: {error.strerror or error}"
    try:
        size = reader.size
    finally:
        reader.close()
    if size == file.size:
        return None
    return f"{file.name} has {size:,} bytes, not the {file.size:,} that were saved"
