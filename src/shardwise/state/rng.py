"""The state of all random number generators of a rank."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch

from shardwise.errors import StateError
from shardwise.state.objects import encode


class RngState:
    """Randomness of python, numpy, torch on the CPU and on this rank's accelerators; per rank.

    In a world of the same size each rank goes on with its own streams, bit for bit. In another,
    ranks that existed do so too, and each further rank starts streams of its own, seeded from
    rank 0's saved state and its own number, so that no two ranks share one.
    """

    def capture(self) -> object:
        """The state of every generator, as plain values and tensors."""
        return self.state_dict()

    def restore(self, value: object) -> None:
        """Take on a saved state, or a seed."""
        if isinstance(value, int):
            _seed(value)
        else:
            self.load_state_dict(value)

    def for_rank(self, values: Sequence[object], rank: int, world: int) -> object:
        """The rank's own state, or a seed if there was no such rank."""
        if rank < len(values):
            return values[rank]
        plain = msgspec.json.encode(encode(values[0], "rng"))
        digest = hashlib.blake2b(plain + b"rank %d" % rank, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def state_dict(self) -> dict[str, object]:
        """The state of every generator."""
        version, words, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        return {
            "python": [version, np.array(words, np.uint64), gauss],
            "numpy": [kind, keys, position, has_gauss, cached],
            "torch": torch.get_rng_state(),
            "devices": _device_states(),
        }

    def load_state_dict(self, state_dict: object) -> None:
        """Set every generator; those of devices that this process does not have are left out.

        Raises:
            StateError: it is no such state.
        """
        try:
            state = cast(dict[str, Any], state_dict)
            version, words, gauss = state["python"]
            random.setstate((version, tuple(words.tolist()), gauss))
            np.random.set_state(tuple(state["numpy"]))
            torch.set_rng_state(state["torch"])
            _set_device_states(state["devices"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateError(f"this is no state of random number generators: {error}") from error


def _accelerator() -> Any:
    device = torch.accelerator.current_accelerator()
    if device is None or not torch.accelerator.is_available():
        return None
    return torch.get_device_module(device)


def _device_states() -> list[torch.Tensor]:
    module = _accelerator()
    if module is None:
        return []
    return [module.get_rng_state(i).cpu() for i in range(module.device_count())]


def _set_device_states(states: Sequence[torch.Tensor]) -> None:
    module = _accelerator()
    if module is None:
        return
    for i, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, i)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
