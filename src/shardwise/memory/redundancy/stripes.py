"""Parity over stripes, rotated among the nodes of a group as in RAID 5 and 6.

Each of `n` nodes has a string of bytes, cut into `n - m` chunks of one size, with zeros at the end.
There are `n` stripes. Stripe `j` has `m` blocks of parity, on nodes `j … j+m-1`, and a chunk of
each other node: chunk `f` of node `j+m+f` (all modulo `n`). So no node holds two pieces of one
stripe, any `m` nodes may be lost, and all nodes keep alike: `m / (n - m)` of the data on top.

The code of a stripe is XOR for `m = 1` (Patterson, Gibson, Katz: RAID, SIGMOD 1988). From 2 on it
is Reed–Solomon over GF(2⁸) with a Cauchy matrix (Blömer et al.: An XOR-based erasure-resilient
coding scheme, 1995), which decodes after every loss of `m`; computed by isa-l through pyeclib.
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
"""Chunks are multiples of this many bytes, so that blocks of checksums lie in one chunk each."""

MOST_NODES = 32
"""Of a group with two blocks of parity to a stripe, or more: what liberasurecode can do."""

_SLICE = 64 * 1024  # of each block at a time: some of them fit into the second level of cache
_RS_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Stripe:
    """Who holds the pieces of a stripe; nodes are positions in their group.

    Attributes:
        data: at position `f`, the node whose chunk number `f` is part of the stripe.
        parity: at position `q`, the node that keeps block number `q` of the stripe's parity.
    """

    data: tuple[int, ...]
    parity: tuple[int, ...]


def stripes(n: int, m: int) -> tuple[Stripe, ...]:
    """The stripes of a group of `n` nodes with `m` blocks of parity to a stripe.

    Raises:
        ValueError: `m` is not less than `n`, or negative.
    """
    if not 0 <= m < n:
        raise ValueError(f"{m} blocks of parity in a group of {n} nodes: fewer than nodes needed")
    return tuple(
        Stripe(
            tuple((j + m + f) % n for f in range(n - m)),
            tuple((j + q) % n for q in range(m)),
        )
        for j in range(n)
    )


def stripe_of_chunk(node: int, chunk: int, n: int, m: int) -> int:
    """The stripe that a node's chunk is part of."""
    return (node - m - chunk) % n


def stripe_of_parity(node: int, block: int, n: int) -> int:
    """The stripe whose parity block of this number a node keeps."""
    return (node - block) % n


def chunk_size(lengths: Sequence[int], n: int, m: int) -> int:
    """Bytes of a chunk for strings of these lengths: the least that holds the longest of them."""
    return max(GRAIN, -(-max(lengths) // ((n - m) * GRAIN)) * GRAIN)


class Code(Protocol):
    """The code of one stripe: `k` data blocks, numbered from 0, then the parity blocks from `k`."""

    window: int

    def recover(self, blocks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        """Fill the blocks of `out`, which are lost or not yet made, from the first `k` of others.

        All have one length. A block has to stay as it is until `window` more have been taken, so
        that many may come in little memory.

        Raises:
            StoreError: there are fewer than `k`.
        """
        ...

    def close(self) -> None:
        """Let go of the library's resources."""
        ...


def code_of(k: int, m: int) -> Code:
    """The code for `k` data and `m` parity blocks; the caller closes it.

    Raises:
        StoreError: it needs pyeclib, which is not there, or cannot do this.
    """
    return _Xor(k) if m == 1 else _ReedSolomon(k, m)


def encode(blocks: Sequence[Buffer], m: int) -> list[Buffer]:
    """The `m` blocks of parity for data blocks of one length."""
    k = len(blocks)
    return decode(dict(enumerate(blocks)), range(k, k + m), k, m)


def decode(present: Mapping[int, Buffer], missing: Sequence[int], k: int, m: int) -> list[Buffer]:
    """Blocks that are missing, from those present.

    Args:
        present: by number: data from 0, parity from `k`; all of one length.
        missing: the numbers of the blocks to be had.
        k: how many data blocks there are.
        m: how many parity blocks.

    Raises:
        StoreError: fewer than `k` blocks are present, or the library is missing.
    """
    size = len(next(iter(present.values()), b""))
    found = {number: np.empty(size, np.uint8) for number in missing}
    code = code_of(k, m)
    try:
        for low in range(0, max(size, 1), _SLICE):
            cut = slice(low, low + _SLICE)
            blocks = ((number, present[number][cut]) for number in present if number not in found)
            code.recover(blocks, {number: block[cut] for number, block in found.items()})
    finally:
        code.close()
    return [found[number] for number in missing]


class _Xor:
    def __init__(self, k: int) -> None:
        self._k = k
        self.window = 2

    def recover(self, blocks: Iterable[tuple[int, Buffer]], out: Mapping[int, Buffer]) -> None:
        # Any k of the k + 1 blocks add up to the one that is left.
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
    """By pyeclib, which holds the GIL as long as it works on a slice: some 20 µs.

    Its fragments are a header and a block. Headers say nothing of the content, so they are not
    stored, but made again: they are those of zeros. Encoding too is done as a reconstruction, of
    blocks that were never there: it copies each block once, where pyeclib's own copies it thrice.
    """

    def __init__(self, k: int, m: int) -> None:
        if k + m > MOST_NODES:
            raise StoreError(
                f"{m} blocks of parity for {k} of data: at most {MOST_NODES} together can be done; "
                "use smaller groups"
            )
        try:
            library = importlib.import_module("pyeclib.ec_iface")
        except ImportError as error:
            raise StoreError(
                f"parity that survives the loss of {m} nodes needs pyeclib ({error}): "
                "pip install 'shardwise[parity]', or ask for parity=1"
            ) from error
        try:
            self._driver: Any = library.ECDriver(k=k, m=m, ec_type="isa_l_rs_cauchy")
        except library.ECDriverError as error:
            raise StoreError(
                f"pyeclib cannot do isa_l_rs_cauchy for {k} + {m} blocks: {error}"
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
            # It takes bytes objects only, and ends the process where it is given anything else.
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
        raise StoreError(f"a stripe needs {need} of its pieces, and {have} are left")
