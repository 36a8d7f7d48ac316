"""Sources of samples, and the place of a stream in a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from shardwise.data.random_order import permute
from shardwise.kernel.errors import StateError


class Source(Protocol):
    """Samples in *segments*, for example files. Segments are shuffled; each is read in order.

    A source is sent to the workers, so it must be picklable if workers are spawned.

    Attributes:
        segment_count: the number of segments.
    """

    @property
    def segment_count(self) -> int: ...

    def read(self, segment: int, start: int) -> Iterable[Any]:
        """Return the samples of a segment, from sample `start` on. Each call returns the same.

        Args:
            segment: the number of the segment.
            start: how many samples to leave out; at most as many as the segment has.
        """
        ...


@dataclass(frozen=True)
class FileSource:
    """Samples in files. Each file is one segment.

    To resume within a file, the samples before the place are read and dropped. If your format can
    seek, write a class with `segment_count` and `read` instead.

    Attributes:
        files: the files: paths, URLs, or what `open_file` takes. Their order must not change.
        open_file: returns the samples of a file, in the same order at each call.
    """

    files: Sequence[Any]
    open_file: Callable[[Any], Iterable[Any]]

    @property
    def segment_count(self) -> int:
        """The number of files."""
        return len(self.files)

    def read(self, segment: int, start: int) -> Iterable[Any]:
        """Return the samples of a file, from sample `start` on."""
        return islice(self.open_file(self.files[segment]), start, None)


@dataclass(frozen=True)
class MapSource:
    """The samples of a map dataset. Each sample is one segment, so all samples are shuffled.

    Attributes:
        dataset: has `len()` and returns samples by index.
    """

    dataset: Any

    @property
    def segment_count(self) -> int:
        """The number of samples."""
        return len(self.dataset)

    def read(self, segment: int, start: int) -> Iterable[Any]:
        """Return a list with the sample, or an empty list if `start` is 1."""
        return [self.dataset[segment]][start:]


@dataclass(frozen=True, slots=True)
class Place:
    """The next sample that a stream reads from a source.

    Attributes:
        finished_segments: how many segments the stream has finished, in all epochs.
        offset: the number of the sample in the segment.
    """

    finished_segments: int = 0
    offset: int = 0


class SourceReader:
    """Reads one stream's share of a source, one epoch after the other.

    In each epoch, the segments of the source have another random order. Stream `v` of `V` reads
    the segments at the positions v, v + V, v + 2V … of this order.
    """

    def __init__(
        self, name: str, source: Source, seed: int, positions: range, place: Place
    ) -> None:
        """`positions` are those of the stream's segments: `range(v, source.segment_count, V)`."""
        self.name = name
        self._source = source
        self._seed = seed
        self._positions = positions
        self._samples: Iterator[Any] | None = None
        self.place = place

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.place.finished_segments // len(self._positions)

    @property
    def segment(self) -> int:
        """The segment of the next sample."""
        position = self._positions[self.place.finished_segments % len(self._positions)]
        key = f"{self._seed} {self.epoch} {self.name}"
        return int(permute(np.array([position]), self._source.segment_count, key)[0])

    def read(self) -> Any:
        """Return the sample at the place. If the segment has no more, go on with the next segment.

        The place stays at the returned sample. Call `skip_sample` before the next `read`.

        Raises:
            StateError: none of the stream's segments has a sample.
            Exception: as the source raised it.
        """
        for _ in range(len(self._positions) + 1):
            if self._samples is None:
                self._samples = iter(self._source.read(self.segment, self.place.offset))
            for sample in self._samples:
                return sample
            self.skip_segment()
        raise StateError(
            f"the source {self.name!r} has no samples in the segments of one stream (positions "
            f"{self._positions.start}, {self._positions.start + self._positions.step}, … of its "
            "order): remove empty segments, or use fewer streams"
        )

    def skip_sample(self) -> None:
        """Move to the sample after the one that was read."""
        self.place = Place(self.place.finished_segments, self.place.offset + 1)

    def skip_segment(self) -> None:
        """Move to the first sample of the next segment."""
        self.place = Place(self.place.finished_segments + 1)
        self._samples = None
