"""Digests of tensors, computed where the tensors are, so that nothing is copied off a device.

The digest of a tensor is a weighted sum of its bits: its bytes are 32-bit words, and each word is
multiplied by a weight that depends on its position. Sums are modulo 2^64.

All weights are odd. So a single flipped bit always changes the sum: by an odd number times 2^b with
b < 32. A change of several words is missed if the changes cancel out. Weights are pseudo-random, so
two changed words cancel out with a probability of at most 2^-32, and random contents are equal with
a probability of 2^-64. Whoever knows the weights can make collisions: the digest finds errors, and
does not prove who wrote the bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from shardwise.kernel.state.local_state import view_for_numpy

BLOCK_WORDS = 1 << 15
"""The weights of words repeat after a block. The sum of each block has a weight of its own."""
BLOCKS_AT_ONCE = 64
"""How many blocks are converted at once: 16 MiB of 64-bit numbers."""
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class BitSums:
    """Computes digests of tensors. It keeps the weights of words on each device."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def of_all(self, tensors: list[torch.Tensor]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """Return the digests of tensors, `(len(tensors),)`.

        Equal bytes have equal digests, whatever the devices and strides of the tensors.
        """
        sums = [self._sum(each) for each in tensors]
        by_device: dict[torch.device, list[int]] = {}
        for i, each in enumerate(sums):
            by_device.setdefault(each.device, []).append(i)
        found = np.zeros(len(tensors), np.uint64)
        for indices in by_device.values():  # one transfer for each device
            found[indices] = torch.stack([sums[i] for i in indices]).cpu().numpy().view(np.uint64)
        return found

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the digest of a tensor as a scalar of int64 on its device."""
        flat = view_for_numpy(tensor).contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // 4 * 4
        if flat.data_ptr() % 4:
            flat = flat.clone()
        words = flat[:whole].view(torch.int32)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        full = len(words) // BLOCK_WORDS
        for low in range(0, full, BLOCKS_AT_ONCE):
            high = min(low + BLOCKS_AT_ONCE, full)
            part = words[low * BLOCK_WORDS : high * BLOCK_WORDS].view(-1, BLOCK_WORDS)
            weights = torch.from_numpy(_weights_at(1, low, high)).to(flat.device)
            total += (self._weigh(part) * weights).sum()
        rest = words[full * BLOCK_WORDS :]
        if whole < flat.numel():  # up to three bytes, padded with zeros
            last = torch.zeros(4, dtype=torch.uint8, device=flat.device)
            last[: flat.numel() - whole] = flat[whole:]
            rest = torch.cat([rest, last.view(torch.int32)])
        if len(rest):
            weights = torch.from_numpy(_weights_at(1, full, full + 1)).to(flat.device)
            total += (self._weigh(rest.view(1, -1)) * weights).sum()
        return total

    def _weigh(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row."""
        if blocks.device not in self._weights:
            weights = torch.from_numpy(_weights_at(0, 0, BLOCK_WORDS))
            self._weights[blocks.device] = weights.to(blocks.device)
        weights = self._weights[blocks.device][: blocks.shape[1]]
        numbers = blocks.to(torch.int64)
        # On the CPU, the product needs no further memory; accelerators have none of integers.
        return numbers @ weights if blocks.device.type == "cpu" else (numbers * weights).sum(dim=1)


def _weights_at(seed: int, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return odd pseudo-random weights of the positions `low:high`, by SplitMix64 (Steele, 2014).

    Args:
        seed: 0 for words, 1 for blocks.
    """
    with np.errstate(over="ignore"):
        state = np.arange(low + 1, high + 1, dtype=np.uint64) * _MIX[0] + np.uint64(seed) * _MIX[1]
        state = (state ^ (state >> np.uint64(30))) * _MIX[1]
        state = (state ^ (state >> np.uint64(27))) * _MIX[2]
        mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = state ^ (state >> np.uint64(31))
    return (mixed | np.uint64(1)).view(np.int64)
