"""Virtual streams: endless sequences of items, each with a place in every source and a buffer.

A stream depends on nothing but its number and the dataset. Streams move between ranks and workers
as a whole, so the items do not depend on the number of ranks and workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from shardwise.data.packing import Packer, Tokens
from shardwise.data.sources import Place, Source, SourceReader
from shardwise.kernel.engine.check_numbers import check_integer
from shardwise.kernel.errors import StateError, add_note

_GOLDEN_RATIO = 0x9E3779B97F4A7C15
"""2⁶⁴ divided by the golden ratio. Its multiples are spread evenly over 2⁶⁴."""
_MOST_EMPTY_DOCUMENTS = 1_000_000
_NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class StreamState:
    """How far a stream is.

    Attributes:
        samples: how many samples the stream has finished, of all sources.
        used_tokens: how many tokens of the next sample are used already.
        source: if some tokens of the next sample are used, the source of this sample; otherwise
            empty. The other tokens of this sample come next, even if the weights have changed.
        places: the place in each source, by name.
        buffer: the tokens in the packer.
    """

    samples: int = 0
    used_tokens: int = 0
    source: str = ""
    places: Mapping[str, Place] = field(default_factory=dict)
    buffer: Tokens = field(default_factory=lambda: _NO_TOKENS)


class ElasticStreamDataset:
    """A mixture of sources, optionally packed into sequences, in virtual streams.

    A stream never ends: after the last sample of a source, the next epoch of that source begins.
    Read the dataset with an `ElasticStreamLoader`.

    Args:
        sources: the sources by name. Each needs at least as many segments as there are streams.
        streams: the number of streams. It is fixed for the run, and limits the number of ranks.
        weights: how often each source is read, by name. Default: equally often. Weights may change
            on resume. A source with weight 0 keeps its place.
        transform: turns a sample into an item, or, with a packer, into a one-dimensional array of
            tokens. Repeated calls for a sample must return the same result.
        packer: returns a new packer, for example `partial(ConcatPacker, 8192)`. Without it, each
            sample is an item.
        seed: selects the random order of segments.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of range.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        streams: int,
        weights: Mapping[str, float] | None = None,
        transform: Callable[[Any], Any] | None = None,
        packer: Callable[[], Packer] | None = None,
        seed: int = 0,
    ) -> None:
        caller = "ElasticStreamDataset"
        if not all(isinstance(name, str) and name for name in sources):
            raise TypeError(f"{caller}(sources): expected names as keys, not {list(sources)}")
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.streams = check_integer(f"{caller}(streams", streams)
        self.transform = transform
        self.packer = packer
        self.seed = check_integer(f"{caller}(seed", seed, least=0)
        self._names = tuple(self.sources)
        self._thresholds = _thresholds(self._names, weights)
        for name, source in self.sources.items():
            if source.segment_count < self.streams:
                raise ValueError(
                    f"{caller}: the source {name!r} has {source.segment_count} segments, less than "
                    f"one for each of {self.streams} streams: use fewer streams, or smaller "
                    "segments"
                )

    def source_of(self, stream: int, sample: int) -> str:
        """Return the source of sample number `sample` of a stream.

        In any short sequence of sample numbers of a stream, each source occurs in proportion to its
        weight. Streams begin at evenly spaced points, so the same holds for a global batch.
        """
        start = (stream << 64) // self.streams
        point = (start + sample * _GOLDEN_RATIO) % 2**64
        return self._names[bisect_right(self._thresholds, point)]


def _thresholds(names: tuple[str, ...], weights: Mapping[str, float] | None) -> list[int]:
    """Return, for each source, the end of its part of the numbers below 2⁶⁴."""
    given = dict.fromkeys(names, 1.0) if weights is None else weights
    if not isinstance(given, Mapping):
        raise TypeError(
            f"ElasticStreamDataset(weights={weights!r}): expected a dict from the names "
            "of sources to numbers, such as {'web': 2, 'code': 1}"
        )
    if given.keys() != set(names):
        raise ValueError(
            f"ElasticStreamDataset(weights): expected a weight for each of {list(names)}, not for "
            f"{list(given)}"
        )
    try:
        numbers = [float(given[name]) for name in names]
    except (TypeError, ValueError) as error:
        raise TypeError(f"ElasticStreamDataset(weights={weights!r}): {error}") from error
    ends = list(accumulate(numbers))
    if not ends or min(numbers) < 0 or not 0 < ends[-1] < np.inf:
        raise ValueError(
            f"ElasticStreamDataset(weights={weights}): expected at least one source, and finite "
            "weights of at least 0 that are not all 0"
        )
    return [int(end / ends[-1] * 2**64) for end in ends]


class Stream:
    """One virtual stream of a dataset, from a state on."""

    def __init__(self, dataset: ElasticStreamDataset, number: int, state: StreamState) -> None:
        self._dataset = dataset
        self._number = number
        self._samples = state.samples
        self._used = state.used_tokens
        self._source = state.source
        self._document: Any = None  # the next sample, if it was read already
        self._packer = None if dataset.packer is None else dataset.packer()
        if self._packer is not None:
            self._packer.restore(state.buffer)
        self._readers = {
            name: SourceReader(
                name,
                source,
                dataset.seed,
                range(number, source.segment_count, dataset.streams),
                state.places.get(name, Place()),
            )
            for name, source in dataset.sources.items()
        }

    def state(self) -> StreamState:
        """Return the state after the last item.

        Raises:
            StateError: the packer buffers more than its capacity.
        """
        places = {name: reader.place for name, reader in self._readers.items()}
        buffer = _NO_TOKENS
        if self._packer is not None:
            buffer = np.array(self._packer.buffered(), np.int32)
            if len(buffer) > self._packer.capacity:
                raise StateError(
                    f"the packer {self._packer.name!r} has {len(buffer)} elements in its buffer, "
                    f"more than its capacity of {self._packer.capacity}: raise `capacity`"
                )
        source = self._source if self._used else ""
        return StreamState(self._samples, self._used, source, places, buffer)

    def next_item(self) -> Any:
        """Return the next item.

        Raises:
            StateError: a sample is not an array of tokens, a source is empty, or the packer does
                not follow its protocol.
            Exception: the source or `transform` raised it.
        """
        if self._packer is None:
            item = self._read_sample()
            self._finish_sample()
            return item
        empty = 0
        while (sequence := self._packer.finished()) is None:
            document = self._read_document()
            taken = self._packer.add(document) if len(document) else 0
            self._used += taken
            if taken == len(document):
                empty = 0 if taken else empty + 1
                self._finish_sample()
            elif (sequence := self._packer.finished()) is not None:
                return sequence
            else:
                raise StateError(
                    f"the packer {self._packer.name!r} took {taken} of {len(document)} tokens, but "
                    "finished no sequence: Packer.add may leave tokens only if it finishes one"
                )
            if empty > _MOST_EMPTY_DOCUMENTS:
                raise StateError(
                    f"before {self._where()}, {empty} documents in a row have no tokens: check "
                    "`transform` and the source"
                )
        return sequence

    def _read_document(self) -> Tokens:
        """Return the tokens of the next sample that are not used yet."""
        if self._document is None:
            tokens = np.asarray(self._read_sample())
            if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
                raise StateError(
                    f"{self._where()}: expected a one-dimensional array of integers to pack, not "
                    f"{tokens.dtype} of shape {list(tokens.shape)}: return one from `transform`"
                )
            converted = tokens.astype(np.int32)
            if not np.array_equal(converted, tokens):
                raise StateError(
                    f"{self._where()}: its tokens do not fit into int32: return numbers from -2³¹ "
                    "to 2³¹ - 1 from `transform`"
                )
            if len(tokens) < self._used:
                raise StateError(
                    f"{self._where()}: it has {len(tokens)} tokens, but {self._used} of them were "
                    "used before the restart: `transform` must return the same at each call"
                )
            self._document = converted
        rest: Tokens = self._document[self._used :]
        return rest

    def _read_sample(self) -> Any:
        """Return the next sample, transformed."""
        transform = self._dataset.transform
        try:
            sample = self._reader().read()
            return sample if transform is None else transform(sample)
        except StateError:
            raise
        except Exception as error:
            add_note(error, self._where())
            raise

    def _finish_sample(self) -> None:
        self._reader().skip_sample()
        self._samples += 1
        self._used = 0
        self._source = ""
        self._document = None

    def _reader(self) -> SourceReader:
        if not self._source:
            self._source = self._dataset.source_of(self._number, self._samples)
        return self._readers[self._source]

    def _where(self) -> str:
        reader = self._reader()
        return (
            f"sample {reader.place.offset} in segment {reader.segment} of the source "
            f"{reader.name!r} (epoch {reader.epoch}, stream {self._number})"
        )


BatchPart = tuple[list[Any], dict[int, StreamState]]
"""What one worker contributes to a batch: the items, in the order of their streams, and the states
of the worker's streams after these items."""


def produce_parts(
    dataset: ElasticStreamDataset, states: Mapping[int, StreamState], items_per_stream: int
) -> Iterator[BatchPart]:
    """Yield a worker's parts of all batches.

    Args:
        states: the worker's streams, and where they begin.
        items_per_stream: how many items each stream contributes to a batch.
    """
    streams = {number: Stream(dataset, number, state) for number, state in states.items()}
    while True:
        items = [stream.next_item() for stream in streams.values() for _ in range(items_per_stream)]
        yield items, {number: stream.state() for number, stream in streams.items()}
