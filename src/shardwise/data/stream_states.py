"""The states of streams as the rows of tensors, which a checkpoint stores like any others.

Each stream has one row. A rank holds the rows of its streams, so a load under another number of
ranks reads exactly the rows that each rank needs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from shardwise.data.packing import Tokens
from shardwise.data.random_order import ORDER_VERSION
from shardwise.data.sources import Place
from shardwise.data.streams import ElasticStreamDataset, StreamState
from shardwise.kernel.boxes import Box
from shardwise.kernel.errors import StateError
from shardwise.kernel.state.local_state import Shards

_COUNTS = 4
"""The first columns of `cursors`: the number of samples, used tokens and buffered tokens; and the
number of the source whose tokens are used, from 1, or 0 for none."""
_DAMAGED = "it is damaged; load another checkpoint, or leave the loader out with skip="


def encode_states(
    dataset: ElasticStreamDataset, states: Mapping[int, StreamState]
) -> dict[str, object]:
    """Return the states of this rank's streams, and the settings that they depend on.

    Returns:
        A dict with plain values, and with `Shards` of two tensors that have a row for each stream
        of the dataset: `cursors` (int64) and `buffers` (int32).
    """
    names = list(dataset.sources)
    cursors = np.zeros((len(states), _COUNTS + 2 * len(names)), np.int64)
    buffers = np.zeros((len(states), _capacity(dataset)), np.int32)
    for row, state in enumerate(states.values()):
        places = [state.places.get(name, Place()) for name in names]
        source = 1 + names.index(state.source) if state.source else 0
        counts = (state.samples, state.used_tokens, len(state.buffer), source)
        cursors[row] = [
            *counts,
            *(n for each in places for n in (each.finished_segments, each.offset)),
        ]
        buffers[row, : len(state.buffer)] = state.buffer
    first = min(states)
    return {
        **_settings(dataset),
        "sources": {name: source.segment_count for name, source in dataset.sources.items()},
        "cursors": _rows(cursors, first, dataset.streams),
        "buffers": _rows(buffers, first, dataset.streams),
    }


def decode_states(
    dataset: ElasticStreamDataset, state: Mapping[str, object], streams: range
) -> dict[int, StreamState]:
    """Return the states of some streams.

    Args:
        state: what `encode_states` returned; with whole tensors, or with the rows of `streams`.
        streams: the streams of this rank.

    Raises:
        StateError: the state belongs to other streams, or is invalid.
    """
    saved_names = _check_settings(dataset, state)
    cursors = _array(state, "cursors", streams, dataset)
    buffers = _array(state, "buffers", streams, dataset)
    has_shape = cursors.shape[1:] == (_COUNTS + 2 * len(saved_names),) and buffers.ndim == 2
    if not has_shape or (cursors < 0).any():
        raise StateError(
            "the state of the streams has negative numbers, or another shape than the sources "
            f"{saved_names} need: {_DAMAGED}"
        )
    found = {}
    for row, stream in enumerate(streams):
        samples, used, buffered, source, *places = map(int, cursors[row])
        if buffered > buffers.shape[1] or source > len(saved_names):
            raise StateError(
                f"stream {stream}: the saved state counts {buffered} tokens and names source "
                f"number {source}, but it contains {buffers.shape[1]} tokens and "
                f"{len(saved_names)} sources: {_DAMAGED}"
            )
        if bool(used) != bool(source):
            found_source = (
                f"names the source {saved_names[source - 1]}" if source else "names no source"
            )
            raise StateError(
                f"stream {stream}: the saved state says that {used} tokens of a sample are used, "
                f"but {found_source}: {_DAMAGED}"
            )
        buffer = buffers[row, :buffered].astype(np.int32)
        _check_buffer(dataset, stream, buffer)
        found[stream] = StreamState(
            samples,
            used,
            saved_names[source - 1] if source else "",
            dict(zip(saved_names, map(Place, places[::2], places[1::2]), strict=True)),
            buffer,
        )
    return found


def _check_buffer(dataset: ElasticStreamDataset, stream: int, buffer: Tokens) -> None:
    try:
        if dataset.packer is not None:
            dataset.packer().restore(buffer)
    except ValueError as error:
        raise StateError(
            f"stream {stream}: the saved token buffer does not suit the packer: {error}: pass the "
            "packer of the save, with the same settings; or leave the loader out with skip="
        ) from error


def _settings(dataset: ElasticStreamDataset) -> dict[str, object]:
    return {
        "version": ORDER_VERSION,
        "streams": dataset.streams,
        "seed": dataset.seed,
        "packer": None if dataset.packer is None else dataset.packer().name,
    }


def _check_settings(dataset: ElasticStreamDataset, state: Mapping[str, object]) -> list[str]:
    """Return the names of the saved sources, in the order of their columns.

    Raises:
        StateError: a setting that determines the items differs.
    """
    saved = state.get("sources")
    if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
        raise StateError(
            "the state is not that of an ElasticStreamLoader: it has no sources: load it into the "
            "object that saved it, or leave the loader out with skip="
        )
    changed = [
        f"{name} was {state.get(name)!r} and is {value!r}"
        for name, value in _settings(dataset).items()
        if state.get(name) != value
    ]
    for name, segments in saved.items():
        source = dataset.sources.get(name)
        if source is None:
            changed.append(f"source {name!r} is missing; keep it with weight 0")
        elif source.segment_count != segments:
            changed.append(
                f"source {name!r} had {segments} segments and has {source.segment_count}"
            )
    if changed:
        raise StateError(
            f"the streams have changed: {'; '.join(changed)}. Pass the same settings; only the "
            "weights, global_batch and the number of ranks may change, and sources may be added"
        )
    return sorted(saved)


def _capacity(dataset: ElasticStreamDataset) -> int:
    return 0 if dataset.packer is None else dataset.packer().capacity


def _rows(array: np.ndarray, first: int, streams: int) -> Shards:
    """Return this rank's rows, from row `first`, as part of a tensor with a row per stream."""
    data = torch.from_numpy(array)
    box = Box((first, *(0 for _ in array.shape[1:])), array.shape)
    return Shards((streams, *array.shape[1:]), data.dtype, [(box, data)])


def _array(
    state: Mapping[str, object], name: str, streams: range, dataset: ElasticStreamDataset
) -> np.ndarray:
    """Return the rows of some streams, from a whole tensor or from `Shards` of only these rows."""
    value = state.get(name)
    if isinstance(value, Shards) and not value.fragments and 0 in value.shape:
        value = torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, torch.Tensor) and value.shape[:1] == (dataset.streams,):
        return value[streams.start : streams.stop].numpy()
    if isinstance(value, Shards):
        for fragment in value.fragments:
            if fragment.box.offset[0] == streams.start and len(fragment.data) == len(streams):
                return fragment.data.numpy()
    raise StateError(
        f"the state has no {name!r} for the streams {streams.start} to {streams.stop - 1}: load it "
        "with sw.load, or pass the state of a single rank"
    )
