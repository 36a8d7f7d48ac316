"""The source of an export: a checkpoint, of which any part of a tensor can be read."""

from __future__ import annotations

import torch

from shardwise.convert.plan import TensorPart
from shardwise.engine.buffers import Arena
from shardwise.engine.load import read_leaves
from shardwise.manifest.layout import Layout
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.store import Files
from shardwise.store.store import Buffer


class CheckpointSource:
    """Reads parts of tensors from a checkpoint.

    Args:
        store, layout: the checkpoint.
        arena: the buffers that bytes are read through.
        verify: whether to verify checksums.
    """

    def __init__(self, store: Files, layout: Layout, arena: Arena, *, verify: bool = True) -> None:
        self._store = store
        self._saved = SavedNames(layout)
        self._arena = arena
        self._verify = verify

    def read(self, parts: list[tuple[TensorPart, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes differ from the bytes that were saved.
        """
        leaves = []
        unaligned: list[tuple[torch.Tensor, Buffer]] = []
        for part, buffer in parts:
            dtype = getattr(torch, part.dtype)
            if buffer.ctypes.data % dtype.itemsize:
                data = torch.empty(part.box.shape, dtype=dtype, device="cpu")
                unaligned.append((data, buffer))
            else:
                data = torch.from_numpy(buffer).view(dtype).view(part.box.shape)
            entry = self._saved.tensor(part.name)
            shape = part.box.shape if entry is None else entry.shape
            leaves.append(TensorLeaf(part.name, dtype, shape, (Fragment(part.box, data),)))
        read_leaves(leaves, self._saved, self._store, self._arena, verify=self._verify)
        for data, buffer in unaligned:
            buffer[:] = data.reshape(-1).view(torch.uint8).numpy()
