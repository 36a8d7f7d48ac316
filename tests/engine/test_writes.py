"""What a save reads of a state that another thread changes: each byte once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch

import shardwise as sw
from tests.tools.agents import NEEDS_AGENT


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param(None, id="waiting"),
        pytest.param(sw.Memory(), id="in memory", marks=NEEDS_AGENT),
    ],
)
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

    def copy_batch_and_change(self: Any) -> None:
        batch = self._batch
        copying.temp_original(self)
        for tensor in batch:
            sizes.append(tensor.nbytes)
            tensor += 1

    reading = patch("shardwise.kernel.engine.tensors.HostMemory.read", read_and_change)
    copying = patch("shardwise.kernel.engine.tensors.BatchCopier.flush", copy_batch_and_change)
    if memory is not None:
        memory = sw.Memory(dir=str(tmp_path / "memory"))
    state = {"weights": torch.zeros(nbytes, dtype=torch.uint8)}
    with reading, copying, sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.save(1, state)
    assert sum(sizes) == nbytes, "some of it was read twice, or not at all"
    back = {"weights": torch.zeros(nbytes, dtype=torch.uint8)}
    sw.load(tmp_path / "run" / "step-00000001", back)
    assert int(back["weights"][0]) < len(sizes)


def damaged(wrong: str) -> Any:
    """Return a patch after which planned manifests have a wrong shape, or a tensor twice."""

    def damage(manifest: Any) -> bytes:
        entries = json.loads(bytes(manifest.tensors))
        if wrong == "shape":
            entries[0]["shape"] = [8]
        else:
            entries *= 2
        tensors = msgspec.Raw(json.dumps(entries).encode())
        return making.temp_original(msgspec.structs.replace(manifest, tensors=tensors))

    making = patch("shardwise.kernel.engine.planning.encode_manifest", damage)
    return making


@pytest.mark.parametrize(("wrong", "found"), [("shape", "gaps|outside"), ("tensors", "x")])
def test_a_wrong_manifest_of_a_new_plan_is_not_committed(
    tmp_path: Path, wrong: str, found: str
) -> None:
    said = f"nothing was committed.*({found}).*a bug"
    with damaged(wrong), pytest.raises(sw.FormatError, match=said):
        sw.save(tmp_path / "a", {"x": torch.arange(7.0)})
    assert not (tmp_path / "a" / "manifest.json").exists()
    sw.save(tmp_path / "a", {"x": torch.arange(7.0)})
    assert len([*(tmp_path / "a").iterdir()]) == 2


@NEEDS_AGENT
def test_an_agent_does_not_persist_a_wrong_manifest(tmp_path: Path) -> None:
    memory, state = sw.Memory(dir=str(tmp_path / "memory")), {"x": torch.arange(7.0)}
    root = tmp_path / "run"
    with (
        pytest.raises(sw.StoreError, match=r"'persist'.*nothing was committed"),
        sw.Checkpointer(root, memory=memory) as checkpointer,
        damaged("shape"),
    ):
        checkpointer.save(1, state)
    assert not (root / "step-00000001" / "manifest.json").exists()
    with sw.Checkpointer(root, memory=memory) as checkpointer:
        checkpointer.save(2, state)
    assert sw.open(root).verify().bytes_checked
    assert sw.load(root, {"x": torch.zeros(7)}).step == 2
