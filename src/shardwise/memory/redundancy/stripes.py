"""How a group of nodes divides its data into stripes, and the erasure codes of a stripe.

Parity rotates among the nodes, as in RAID 5 and 6. Each of `n` nodes has a string of bytes: its
files one after another, padded with zeros and cut into `n - m` chunks of equal size. There are `n`
stripes. Stripe `j` has `m` parity blocks, on nodes `j … j+m-1`, and one chunk of every other node:
chunk `f` of node `j+m+f` (all modulo `n`). So no node holds two pieces of one stripe, any `m` nodes
may be lost, and every node stores the same amount of parity: `m / (n - m)` of its data.

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

from shardwise.errors import StoreError
from shardwise.manifest.checksums import BLOCK
from shardwise.store.store import Buffer

GRAIN = BLOCK
"""Chunk sizes are multiples of this many bytes, so that no checksum block spans two chunks."""

MOST_NODES = 32
"""The largest group with two or more parity blocks in a stripe: the limit of liberasurecode."""

_SLICE = 64 * 1024  # bytes of each block processed at a time: several fit into the L2 cache
_RS_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Stripe:
    """Which nodes hold the pieces of a stripe. Nodes are positions in their group.

    Attributes:
        data: at index `f`, the node whose chunk `f` belongs to the stripe.
        parity: at index `q`, the node that stores parity block `q` of the stripe.
    """

    data: tuple[int, ...]
    parity: tuple[int, ...]


def stripes(n: int, m: int) -> tuple[Stripe, ...]:
    """Return the stripes of a group of `n` nodes with `m` parity blocks in each stripe.

    Raises:
        ValueError: `m` is negative, or not less than `n`.
    """
    if not 0 <= m < n:
        raise ValueError(f"{m} blocks of parity in a group of {n} nodes: use 0 to {n - 1}")
    return tuple(
        Stripe(
            tuple((j + m + f) % n for f in range(n - m)),
            tuple((j + q) % n for q in range(m)),
        )
        for j in range(n)
    )


def stripe_of_chunk(node: int, chunk: int, n: int, m: int) -> int:
    """Return the number of the stripe that contains a chunk of a node."""
    return (node - m - chunk) % n


def stripe_of_parity(node: int, block: int, n: int) -> int:
    """Return the number of the stripe whose parity block `block` a node stores."""
    return (node - block) % n


def chunk_size(lengths: Sequence[int], n: int, m: int) -> int:
    """Return the smallest chunk size in bytes with which `n - m` chunks hold the longest string."""
    return max(GRAIN, -(-max(lengths) // ((n - m) * GRAIN)) * GRAIN)


class Code(Protocol):
    """The code of one stripe with `k` data blocks, numbered from 0, and parity blocks from `k`."""

    window: int

    def recover(self, blocks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        """Compute the blocks of `out`, lost or not yet made, from the first `k` of `blocks`.

        All blocks have the same length. `blocks` may be an iterator that reuses its memory: a block
        must stay unchanged until `window` more have been taken.

        Raises:
            StoreError: there are fewer than `k` blocks.
        """
        ...

    def close(self) -> None:
        """Release the library's resources."""
        ...


def code_of(k: int, m: int) -> Code:
    """Return the code for `k` data and `m` parity blocks. The caller closes it.

    Raises:
        StoreError: the code needs pyeclib, which is missing or does not support these numbers.
    """
    return _Xor(k) if m == 1 else _ReedSolomon(k, m)


class _Xor:
    def __init__(self, k: int) -> None:
        self._k = k
        self.window = 2

    def recover(self, blocks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        # The XOR of any k of the k + 1 blocks is the remaining one.
        target, *_ = out.values()
        total: Buffer | None = None
        count = 0
        for count, (_, block) in enumerate(islice(blocks, self._k), 1):  # noqa: B007
            total = block if total is None else np.bitwise_xor(total, block, out=target)
        _check_enough(count, self._k)
        if total is not None and total is not target:
            target[:] = total

    def close(self) -> None:
        pass


class _ReedSolomon:
    """Computed by pyeclib, which holds the GIL for each slice, about 20 µs.

    A fragment of pyeclib is a header and a block. Headers do not depend on the data, so they are
    not stored but made again by encoding zeros. Encoding, too, is done as a reconstruction (of the
    parity blocks): that copies each block once, where pyeclib's own `encode` copies it three times.
    """

    def __init__(self, k: int, m: int) -> None:
        if k + m > MOST_NODES:
            raise StoreError(
                f"a group of {k + m} nodes with {m} parity blocks: at most {MOST_NODES} nodes are "
                "supported; use smaller groups"
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
                f"pyeclib does not support isa_l_rs_cauchy with {k} + {m} blocks: {error}"
            ) from error
        self._k = k
        self.window = k
        self._headers: dict[int, list[bytes]] = {}

    def recover(self, blocks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        missing = sorted(out)
        size = len(out[missing[0]])
        chosen = list(islice(blocks, self._k))
        _check_enough(len(chosen), self._k)
        for low in range(0, size, _SLICE):
            high = min(low + _SLICE, size)
            fragments = [self._fragment(number, block[low:high]) for number, block in chosen]
            # It accepts only bytes objects: any other type crashes the process.
            found = self._driver.reconstruct(fragments, list(missing))
            for number, fragment in zip(missing, found, strict=True):
                start = len(fragment) - _padded(high - low)
                out[number][low:high] = np.frombuffer(fragment, np.uint8, high - low, start)

    def close(self) -> None:
        self._driver.close()

    def _fragment(self, number: int, block: Buffer) -> bytes:
        size = _padded(len(block))
        if size not in self._headers:
            fragments = self._driver.encode(bytes(self._k * size))
            self._headers[size] = [each[: len(each) - size] for each in fragments]
        header = self._headers[size][number]
        return b"".join((header, block.data, bytes(size - len(block))))


def _padded(size: int) -> int:
    return -(-size // _RS_ALIGNMENT) * _RS_ALIGNMENT


def _check_enough(have: int, need: int) -> None:
    if have < need:
        raise StoreError(f"a stripe needs {need} of its pieces, and only {have} are left")
