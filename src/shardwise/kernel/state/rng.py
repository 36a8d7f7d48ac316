"""The state of all random number generators of a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shardwise.kernel.errors import StateError
from shardwise.kernel.state.plain_values import encode

_BITS_32 = 2**32 - 1
_BITS_64 = 2**64 - 1
# Errors that the generators raise for an invalid state.
_INVALID_STATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class RngState:
    """The random number generators of Python, NumPy and torch (CPU and this rank's accelerators).

    Each rank saves the states of its own generators. NumPy's global generator is included. Save
    generators from `numpy.random.default_rng` as separate values of the state.
    Generators of accelerators are included if this process has used an accelerator before the save.

    After a load, each rank that existed at the save continues its streams bit for bit. Each
    additional rank starts a new stream. The seed of that stream is a BLAKE2 digest of rank 0's
    saved state and the rank. The lower 32 bits of the seeds of successive ranks are successive
    numbers, so no two ranks share a stream, even in a generator that uses only 32 bits.

    Example:

        sw.save(path, {"model": model, "rng": sw.RngState()})
    """

    def __repr__(self) -> str:
        return "RngState()"

    def capture(self) -> dict[str, Any]:
        """Return the state of every generator, as plain values and tensors.

        Saves and loads of shardwise call `capture` and `restore`; `state_dict` and
        `load_state_dict` are for other libraries.
        """
        return self.state_dict()

    def restore(self, value: int | dict[str, Any]) -> None:
        """Set a saved state, or seed every generator.

        Raises:
            StateError: the value is neither a saved state nor a seed.
        """
        if isinstance(value, int):
            seed = value & _BITS_64
            random.seed(seed)
            np.random.seed([seed & _BITS_32, seed >> 32])
            torch.manual_seed(seed)
        else:
            self.load_state_dict(value)

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        """Return the saved state of the rank, or a 64-bit seed if the rank did not save a state."""
        return values[rank] if rank < len(values) else _seed_of_new_rank(values[0], rank)

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

        Accelerators are matched by their index. An accelerator without a saved state is unchanged.

        Raises:
            StateError: the value is not a saved state.
        """
        previous_state = self.state_dict()
        try:
            _set_states(state_dict)
        except _INVALID_STATE_ERRORS as error:
            _set_states(previous_state)
            raise StateError(
                f"invalid state of random number generators: {error}; leave it out with skip="
            ) from error


def _set_states(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    module = _accelerator()
    if module is not None:
        for i, each in enumerate(state["devices"][: module.device_count()]):
            module.set_rng_state(each, i)


def _device_states() -> list[torch.Tensor]:
    """Return the states of the accelerators' generators; none if this process uses none.

    Reading a generator's state creates a context on its accelerator. A save must not create one in
    a process that has none.
    """
    module = _accelerator()
    if module is None or not getattr(module, "is_initialized", lambda: True)():
        return []
    return [module.get_rng_state(i).cpu() for i in range(module.device_count())]


def _accelerator() -> Any:
    if not torch.accelerator.is_available():
        return None
    return torch.get_device_module(torch.accelerator.current_accelerator())


def _seed_of_new_rank(first_state: object, rank: int) -> int:
    plain = msgspec.json.encode(encode(first_state, "rng"))
    high = _digest(plain + b"rank %d" % rank) & ~_BITS_32
    low = (_digest(plain) + rank) & _BITS_32
    return high | low


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
