"""How a group of nodes divides its data into stripes, and the erasure codes of a stripe.

Parity rotates among the nodes, as in RAID 5 and 6. Each of `n` nodes has data: its files one after
another, padded with zeros and cut into `n - m` data chunks of equal size. There are `n` stripes.
Stripe `j` has `m` parity chunks, on nodes `j … j+m-1`, and one data chunk of every other node:
chunk `f` of node `j+m+f` (all modulo `n`). So no node holds two chunks of one stripe, any `m` nodes
may be lost, and every node stores the same amount of parity: `m / (n - m)` of its data.

Nodes are numbered by their index in the group. The chunks of a stripe are numbered, too: data
chunks from 0 to `k - 1`, with `k = n - m`, and parity chunks from `k` to `n - 1`.

With `m = 1` the code is XOR (Patterson, Gibson, Katz: RAID, SIGMOD 1988). With more it is
Reed–Solomon over GF(2⁸) with a Cauchy matrix (Blömer et al.: An XOR-based erasure-resilient coding
scheme, 1995), which recovers any `m` losses. isa-l computes it, through pyeclib.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np

from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.checksums import BLOCK
from shardwise.kernel.store.store import Buffer

CHUNK_MULTIPLE = BLOCK
"""Chunk sizes are multiples of this many bytes, so that no checksum block spans two chunks."""

MOST_NODES = 32
"""The largest group with two or more parity chunks in a stripe: the limit of liberasurecode."""

_SLICE_SIZE = (
    64 * 1024
)  # bytes of each chunk that pyeclib gets at a time: several fit into the L2 cache
_FRAGMENT_ALIGNMENT = 16  # pyeclib pads its fragments to a multiple of this many bytes


@dataclass(frozen=True, slots=True)
class Stripe:
    """The indices, in the group, of the nodes that hold the chunks of a stripe.

    Attributes:
        data: at index `f`, the node whose data chunk `f` belongs to the stripe.
        parity: at index `q`, the node that stores parity chunk `q` of the stripe.
    """

    data: tuple[int, ...]
    parity: tuple[int, ...]


def stripes_of_group(n: int, m: int) -> tuple[Stripe, ...]:
    """Return the stripes of a group of `n` nodes with `m` parity chunks in each stripe.

    Raises:
        ValueError: `m` is negative, or not less than `n`.
    """
    if not 0 <= m < n:
        raise ValueError(f"{m} parity chunks in a group of {n} nodes: use 0 to {n - 1}")
    return tuple(
        Stripe(
            tuple((j + m + f) % n for f in range(n - m)),
            tuple((j + q) % n for q in range(m)),
        )
        for j in range(n)
    )


def index_of_data_stripe(node: int, chunk: int, n: int, m: int) -> int:
    """Return the index of the stripe that contains data chunk `chunk` of a node."""
    return (node - m - chunk) % n


def index_of_parity_stripe(node: int, q: int, n: int) -> int:
    """Return the index of the stripe whose parity chunk `q` a node stores."""
    return (node - q) % n


def chunk_size(sizes: Sequence[int], n: int, m: int) -> int:
    """Return the smallest size of a chunk with which `n - m` chunks hold the data of each node.

    Args:
        sizes: bytes of the data of each node.
        n: the number of nodes.
        m: the number of parity chunks in a stripe.
    """
    return max(CHUNK_MULTIPLE, -(-max(sizes) // ((n - m) * CHUNK_MULTIPLE)) * CHUNK_MULTIPLE)


class ErasureCode(Protocol):
    """An erasure code for stripes with `k` data chunks.

    Attributes:
        window: the number of chunks that `recover` needs in memory at the same time.
    """

    window: int

    def recover(self, chunks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        """Compute lost chunks or new parity chunks of a stripe from `k` other chunks.

        Instead of whole chunks, callers may pass the same byte range of each chunk.

        Args:
            chunks: number and bytes of at least `k` chunks; only the first `k` are used. An
                iterator may reuse memory, but a chunk must stay unchanged until `window` further
                chunks have been taken.
            out: number of each chunk to compute, and the memory to fill.

        Raises:
            StoreError: there are fewer than `k` chunks.
        """
        ...

    def close(self) -> None:
        """Release the library's resources."""
        ...


def make_erasure_code(k: int, m: int) -> ErasureCode:
    """Return the code for `k` data chunks and `m` parity chunks. The caller closes it.

    Raises:
        StoreError: the code needs pyeclib, which is missing or does not support these numbers.
    """
    return _Xor(k) if m == 1 else _ReedSolomon(k, m)


class _Xor:
    def __init__(self, k: int) -> None:
        self._k = k
        self.window = 2

    def recover(self, chunks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        # The XOR of any k of the k + 1 chunks is the remaining one.
        target, *_ = out.values()
        total: Buffer | None = None
        count = 0
        for count, (_, chunk) in enumerate(islice(chunks, self._k), 1):  # noqa: B007
            total = chunk if total is None else np.bitwise_xor(total, chunk, out=target)
        _require_chunks(count, self._k)
        if total is not None and total is not target:
            target[:] = total

    def close(self) -> None:
        pass


class _ReedSolomon:
    """A code that pyeclib computes. It holds the GIL for each slice, about 20 µs.

    A fragment of pyeclib is a header and a chunk. Headers do not depend on the data, so they are
    not stored: encoding zeros makes them again. Parity is computed by reconstructing parity chunks
    as if they were lost. This copies each chunk once; pyeclib's `encode` copies it three times.
    """

    def __init__(self, k: int, m: int) -> None:
        if k + m > MOST_NODES:
            raise StoreError(
                f"a group of {k + m} nodes with {m} parity chunks: at most {MOST_NODES} nodes are "
                f"supported; use smaller groups, with Memory(group={MOST_NODES}) or less"
            )
        try:
            library = importlib.import_module("pyeclib.ec_iface")
        except ImportError as error:
            raise StoreError(
                f"parity that survives the loss of {m} nodes needs pyeclib ({error}): "
                "pip install 'shardwise[parity]', or use parity=1"
            ) from error
        try:
            self._driver: Any = library.ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
        except library.ECDriverError as error:
            raise StoreError(
                f"pyeclib does not support isa_l_rs_cauchy with {k} data and {m} parity chunks: "
                f"{error}; install liberasurecode with isa-l, or use parity=1"
            ) from error
        self._k = k
        self.window = k
        self._headers: dict[int, list[bytes]] = {}

    def recover(self, chunks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        missing = sorted(out)
        size = len(out[missing[0]])
        used = list(islice(chunks, self._k))
        _require_chunks(len(used), self._k)
        for low in range(0, size, _SLICE_SIZE):
            high = min(low + _SLICE_SIZE, size)
            fragments = [self._make_fragment(number, chunk[low:high]) for number, chunk in used]
            # pyeclib accepts only bytes objects: any other type crashes the process.
            recovered = self._driver.reconstruct(fragments, list(missing))
            for number, fragment in zip(missing, recovered, strict=True):
                start = len(fragment) - _padded_size(high - low)
                out[number][low:high] = np.frombuffer(fragment, np.uint8, high - low, start)

    def close(self) -> None:
        self._driver.close()

    def _make_fragment(self, number: int, chunk: Buffer) -> bytes:
        size = _padded_size(len(chunk))
        if size not in self._headers:
            fragments = self._driver.encode(bytes(self._k * size))
            self._headers[size] = [each[: len(each) - size] for each in fragments]
        header = self._headers[size][number]
        return b"".join((header, chunk.data, bytes(size - len(chunk))))


def _padded_size(size: int) -> int:
    return -(-size // _FRAGMENT_ALIGNMENT) * _FRAGMENT_ALIGNMENT


def _require_chunks(count: int, needed: int) -> None:
    if count < needed:
        raise StoreError(
            f"a stripe needs {needed} of its chunks, and only {count} are left; restore another "
            "step"
        )
