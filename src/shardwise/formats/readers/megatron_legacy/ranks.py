"""What a rank's files hold, taken apart: chunks of a model, states of optimizers, plain values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Record
from shardwise.formats.containers.ranges import FileRange
from shardwise.formats.containers.torch_files import read_torch_file
from shardwise.formats.foreign import ForeignFile, StoredArray
from shardwise.formats.readers.megatron_legacy.files import (
    FLAT,
    MODEL,
    OLD_MODEL,
    OLD_OPTIMIZER,
    Files,
    Numbers,
)
from shardwise.formats.tree import Tree

ARGS, OPTIMIZER, RNG = "args", "optimizer", "rng_state"
_CHUNK = re.compile(r"model(\d{0,4})")
_OF_TORCH = "_extra_state"

Arrays = Mapping[str, StoredArray]


@dataclass(frozen=True, slots=True)
class Rank:
    """What one model-parallel rank has.

    Attributes:
        numbers: of its directory.
        where: that directory.
        chunks: of the model, one unless stages are interleaved: arrays by name, in order.
        optimizer: as it was saved; None if it was not.
        flat: the buffers of the distributed optimizer, as they were saved; None if there are none.
        args: of the program, by name.
        values: what else there is.
        unread: names of what is in the chunks, and no array.
    """

    numbers: Numbers
    where: str
    chunks: Sequence[Arrays]
    optimizer: Any
    flat: Any
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    unread: Sequence[str]


def listed_files(tree: Tree, files: Files) -> tuple[ForeignFile, ...]:
    """All files of ranks, which their numbers count."""
    return tuple(tree.file(path) for own in files.ranks.values() for path in own.values())


def read_rank(tree: Tree, numbers: Numbers, own: Mapping[str, str], first: int) -> Rank:
    """Read the files of a rank; no array is read.

    Args:
        own: the paths of its files, by their names.
        first: the number of the first of them.

    Raises:
        FormatError: one is malformed.
    """
    held: dict[str, Mapping[Any, Any]] = {}
    flat = None
    where = ""
    for number, (name, path) in enumerate(own.items(), first):
        with closing(tree.open(path)) as file:
            found = read_torch_file(
                FileRange.whole(file, number, f"{tree}/{path}"), opaque=True
            ).value
        if name == FLAT:
            flat = found
        elif not isinstance(found, dict):
            raise FormatError(f"{tree}/{path}: it holds no dict")
        else:
            held[name] = found
            where = f"{tree}/{path}".rpartition("/")[0] if name in (MODEL, OLD_MODEL) else where
    state = {**held.get(OLD_OPTIMIZER, {}), **held.get(OLD_MODEL, {}), **held.get(MODEL, {})}
    chunks = _chunks(state, where)
    parts = [dict(_leaves(chunk, "")) for chunk in chunks.values()]
    arrays = [{n: v for n, v in part.items() if isinstance(v, StoredArray)} for part in parts]
    unread = [n for part in parts for n, v in part.items() if not isinstance(v, StoredArray)]
    args = state.get(ARGS)
    fields = args.fields if isinstance(args, Record) else args if isinstance(args, dict) else {}
    apart = {ARGS, OPTIMIZER, *chunks}
    values = {str(key): value for key, value in state.items() if key not in apart}
    return Rank(numbers, where, arrays, state.get(OPTIMIZER), flat, fields, values, unread)


def _chunks(state: Mapping[Any, Any], where: str) -> dict[str, Mapping[Any, Any]]:
    found: dict[int, str] = {}
    for key in state:
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match is not None:
            found[int(match[1] or 0)] = key
    if sorted(found) != list(range(len(found))) or not found:
        raise FormatError(f"{where}: it has no model, or not all chunks of one")
    chunks = {found[number]: state[found[number]] for number in sorted(found)}
    for key, chunk in chunks.items():
        if not isinstance(chunk, dict):
            raise FormatError(f"{where}: {key} is no dict")
    return chunks


def _leaves(value: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    """What lies in nested dicts, by dotted names; Megatron's old models are nested."""
    for key, each in value.items():
        name = f"{path}{key}"
        if isinstance(each, dict):
            yield from _leaves(each, f"{name}.")
        else:
            yield name, each
