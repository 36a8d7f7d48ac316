"""Sources whose samples say where they come from, for tests of streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.data.packing import Tokens

Sample = tuple[str, int, int]
"""A sample: source, segment, number in the segment."""
_MOST = 1 << 10  # segments of a source, and samples of a segment


@dataclass(frozen=True)
class Labels:
    """A source whose samples are their own names; `sizes` has the number for each segment."""

    name: str
    sizes: tuple[int, ...]

    @property
    def segment_count(self) -> int:
        return len(self.sizes)

    def read(self, segment: int, start: int) -> Iterable[Sample]:
        return ((self.name, segment, i) for i in range(start, self.sizes[segment]))

    def samples(self) -> list[Sample]:
        return [(self.name, k, i) for k, size in enumerate(self.sizes) for i in range(size)]


def label_sources(*sizes: Iterable[int]) -> dict[str, Labels]:
    """Return the sources s0, s1 …"""
    return {f"s{i}": Labels(f"s{i}", tuple(each)) for i, each in enumerate(sizes)}


def tokens_of(sample: Sample) -> Tokens:
    """Return 1 to 9 tokens, which all have the sample's number (from 1)."""
    name, segment, i = sample
    number = (int(name[1:]) * _MOST + segment) * _MOST + i + 1
    return np.full(count_tokens(number), number)


def count_tokens(number: int) -> int:
    return 1 + number * 7 % 9


def sample_of(number: int) -> Sample:
    """Return the sample that has these tokens."""
    rest, i = divmod(number - 1, _MOST)
    name, segment = divmod(rest, _MOST)
    return f"s{name}", segment, i


def whole_samples(tokens: Iterable[int]) -> Counter[Sample]:
    """Return how often each sample occurs among tokens, without padding (0)."""
    counts = Counter(int(token) for token in tokens if token)
    return Counter(
        {sample_of(number): count // count_tokens(number) for number, count in counts.items()}
    )
