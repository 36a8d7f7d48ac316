"""Pack documents of any length into sequences of one length."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np

from shardwise.kernel.engine.check_numbers import check_integer

Tokens: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.integer]]


class Packer(Protocol):
    """Collects tokens of documents, and returns sequences. Each stream has a packer.

    The sequences may depend on nothing but the tokens that were added.

    Attributes:
        name: the kind of the packer and its settings. A state loads only into packers of this name.
        capacity: the largest number of elements that `buffered` returns.
    """

    name: str
    capacity: int

    def add(self, document: Tokens) -> int:
        """Take tokens from the start of a document, and return how many.

        If the result is less than the number of tokens, `finished` must return a sequence next.
        """
        ...

    def finished(self) -> Tokens | None:
        """Return a sequence that is finished, once; None if there is none."""
        ...

    def buffered(self) -> Tokens:
        """Return the tokens in the buffer as an array of int32.

        It is called only after `finished` has returned None.
        """
        ...

    def restore(self, buffered: Tokens) -> None:
        """Set the buffer to what `buffered` returned. Raises ValueError if it is invalid."""
        ...


class ConcatPacker:
    """Joins the documents, and cuts the result into sequences of equal length.

    Nothing is padded, and most sequences begin and end within a document. The state has no tokens,
    only the number of tokens of the last document that are used.

    Args:
        length: the number of tokens of a sequence.
    """

    capacity = 0

    def __init__(self, length: int) -> None:
        self.length = check_integer("ConcatPacker(length", length)
        self.name = f"concat {self.length}"
        self._tokens = np.empty(self.length, np.int32)
        self._filled = 0

    def add(self, document: Tokens) -> int:
        """Take tokens until the sequence is full."""
        taken = min(len(document), self.length - self._filled)
        self._tokens[self._filled : self._filled + taken] = document[:taken]
        self._filled += taken
        return taken

    def finished(self) -> Tokens | None:
        """Return the sequence if it is full."""
        if self._filled < self.length:
            return None
        self._filled = 0
        return self._tokens.copy()

    def buffered(self) -> Tokens:
        """Return no tokens: a state is taken after a sequence, and the buffer is empty then."""
        return self._tokens[:0]

    def restore(self, buffered: Tokens) -> None:
        """Empty the buffer."""
        self._filled = 0


class BestFitPacker:
    """Puts each document into the open sequence in which the least space remains.

    Only documents that are longer than a sequence are cut. If a document fits nowhere, the fullest
    sequence is padded and returned. The open sequences are the *token buffer* of a stream; they
    are part of the state.

    Args:
        length: the number of tokens of a sequence.
        sequences: how many sequences are open at a time. More of them need less padding, and make
            the state larger: up to 4 × `length` × `sequences` bytes for each stream.
        pad: the token that fills the rest of a sequence.
    """

    def __init__(self, length: int, *, sequences: int = 8, pad: int = 0) -> None:
        self.length = check_integer("BestFitPacker(length", length)
        self.sequences = check_integer("BestFitPacker(sequences", sequences)
        self.pad = check_integer("BestFitPacker(pad", pad, least=-(2**31))
        self.name = f"best fit {self.length}, {self.sequences} open, padded with {self.pad}"
        self.capacity = self.sequences * (1 + self.length)
        self._open: list[Tokens] = []
        self._finished: Tokens | None = None

    def add(self, document: Tokens) -> int:
        """Take the document, or its first `length` tokens; nothing if it fits nowhere."""
        document = np.asarray(document[: self.length], np.int32)
        fitting = [i for i, each in enumerate(self._open) if self._fits(each, document)]
        if fitting:
            best = max(fitting, key=lambda i: len(self._open[i]))
            self._open[best] = np.concatenate([self._open[best], document])
        elif len(self._open) < self.sequences:
            best = len(self._open)
            self._open.append(document.copy())
        else:
            self._finish(max(range(len(self._open)), key=lambda i: len(self._open[i])))
            return 0
        if len(self._open[best]) == self.length:
            self._finish(best)
        return len(document)

    def finished(self) -> Tokens | None:
        """Return the sequence that was finished last, with padding."""
        finished, self._finished = self._finished, None
        return finished

    def buffered(self) -> Tokens:
        """Return the number of tokens of each open sequence, and then the tokens."""
        counts = np.zeros(self.sequences, np.int32)
        counts[: len(self._open)] = [len(each) for each in self._open]
        return np.concatenate([counts, *self._open])

    def restore(self, buffered: Tokens) -> None:
        """Set the open sequences. An empty array means that none is open."""
        counts = [int(n) for n in buffered[: self.sequences] if n]
        tokens = buffered[self.sequences :]
        if not all(0 < n < self.length for n in counts) or sum(counts) != len(tokens):
            raise ValueError(
                f"open sequences of {str(counts)[:200]} tokens should have {len(tokens)} tokens "
                f"together, and at most {self.length - 1} each"
            )
        ends = np.cumsum(counts)
        self._open = [np.array(each, np.int32) for each in np.split(tokens, ends)[: len(counts)]]
        self._finished = None

    def _fits(self, sequence: Tokens, document: Tokens) -> bool:
        return len(sequence) + len(document) <= self.length

    def _finish(self, which: int) -> None:
        tokens = self._open.pop(which)
        self._finished = np.full(self.length, self.pad, np.int32)
        self._finished[: len(tokens)] = tokens
