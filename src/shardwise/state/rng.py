"""The state of all random number generators of a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shardwise.errors import StateError
from shardwise.state.objects import encode

_BITS_32 = 2**32 - 1
_BITS_64 = 2**64 - 1
# What the generators raise when they are given something else.
_NO_STATE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class RngState:
    """The random generators of Python, NumPy and torch (CPU and this rank's accelerators).

    Each rank saves its own. Of NumPy this covers the global generator; save generators that
    `numpy.random.default_rng` returned yourself.

    At a load, each rank that existed at the save continues its streams bit for bit. Each
    additional rank starts a new stream. Its seed is a BLAKE2 digest of rank 0's saved state and
    the rank; the lower 32 bits count the ranks, so that no two ranks share a stream, even if a
    generator uses only 32 bits.
    """

    def capture(self) -> dict[str, Any]:
        """Return the state of every generator, as plain values and tensors."""
        return self.state_dict()

    def restore(self, value: int | dict[str, Any]) -> None:
        """Set a saved state, or seed every generator.

        Raises:
            StateError: the value is neither a saved state nor a seed.
        """
        if isinstance(value, int):
            _seed(value & _BITS_64)
        else:
            self.load_state_dict(value)

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the rank's state, or a 64-bit seed if the rank did not save one."""
        return values[rank] if rank < len(values) else _seed_of(values[0], rank)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator."""
        version, words, gauss = random.getstate()
        return {
            "python": [version, np.array(words, np.uint64), gauss],
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "devices": _device_states(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state of every generator, or of none if one fails.

        Accelerators are matched by their position. Those without a saved state do not change.

        Raises:
            StateError: the value is not a saved state.
        """
        before = self.state_dict()
        try:
            _set(state_dict)
        except _NO_STATE as error:
            _set(before)
            raise StateError(f"invalid state of random number generators: {error}") from error


def _set(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    module = _accelerator()
    if module is not None:
        for i, each in enumerate(state["devices"][: module.device_count()]):
            module.set_rng_state(each, i)


def _device_states() -> list[torch.Tensor]:
    module = _accelerator()
    if module is None:
        return []
    return [module.get_rng_state(i).cpu() for i in range(module.device_count())]


def _accelerator() -> Any:
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _seed_of(first: object, rank: int) -> int:
    plain = msgspec.json.encode(encode(first, "rng"))
    return _digest(plain + b"rank %d" % rank) & ~_BITS_32 | (_digest(plain) + rank) & _BITS_32


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & _BITS_32, seed >> 32])
    torch.manual_seed(seed)
