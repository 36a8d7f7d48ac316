"""What a save reads of a state that another thread changes: each byte once."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import shardwise as sw


@pytest.mark.parametrize("memory", [None, sw.Memory()], ids=["waiting", "in memory"])
@pytest.mark.parametrize("nbytes", [100, 5_000, (3 << 20) + 77])
def test_a_state_that_changes_while_it_is_saved_passes_its_checksums(
    tmp_path: Path, memory: sw.Memory | None, nbytes: int
) -> None:
    """Every tensor changes as soon as any part of it has been read."""
    sizes: list[int] = []

    def read_and_change(
        self: Any, index: tuple[slice, ...], out: np.ndarray, *, wait: bool = True
    ) -> None:
        reading.temp_original(self, index, out, wait=wait)
        sizes.append(out.nbytes)
        self._array += 1

    reading = patch("shardwise.engine.tensors.HostMemory.read", read_and_change)
    if memory is not None:
        memory = sw.Memory(dir=str(tmp_path / "memory"))
    state = {"weights": torch.zeros(nbytes, dtype=torch.uint8)}
    with reading, sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.save(1, state)
    assert sum(sizes) == nbytes, "some of it was read twice, or not at all"
    back = {"weights": torch.zeros(nbytes, dtype=torch.uint8)}
    sw.load(tmp_path / "run" / "step-00000001", back)
    assert int(back["weights"][0]) < len(sizes)
