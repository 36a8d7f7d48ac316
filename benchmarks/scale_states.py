"""States of very large jobs, rank by rank: Llama-3.1-405B in training, without its values.

The fragments are views of one element, so that they take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from shardwise.kernel.boxes import (
    Box,
    Sharding,
    ShardPlacement,
    Split,
    boxes_of_range,
    shard_boxes,
    splits_of,
)
from shardwise.kernel.state.local_state import Fragment, LocalState, TensorLeaf

LAYERS, HIDDEN, FFN, KV, VOCAB = 126, 16384, 53248, 1024, 128256
COLUMN_PARALLEL, ROW_PARALLEL, REPLICATED = 0, 1, None
"""The dimension that tensor parallelism splits."""
Parameter = tuple[str, tuple[int, ...], int | None]
"""Its name, its shape, and the dimension that tensor parallelism splits."""
LAYER: Sequence[Parameter] = (
    ("attention.wq.weight", (HIDDEN, HIDDEN), COLUMN_PARALLEL),
    ("attention.wk.weight", (KV, HIDDEN), COLUMN_PARALLEL),
    ("attention.wv.weight", (KV, HIDDEN), COLUMN_PARALLEL),
    ("attention.wo.weight", (HIDDEN, HIDDEN), ROW_PARALLEL),
    ("feed_forward.w1.weight", (FFN, HIDDEN), COLUMN_PARALLEL),
    ("feed_forward.w3.weight", (FFN, HIDDEN), COLUMN_PARALLEL),
    ("feed_forward.w2.weight", (HIDDEN, FFN), ROW_PARALLEL),
    ("attention_norm.weight", (HIDDEN,), REPLICATED),
    ("ffn_norm.weight", (HIDDEN,), REPLICATED),
)
BYTES_OF_GENERATORS = 5056
"""The size of the states of the random number generators of a rank."""


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The place of a rank: its pipeline stage, and its indices in the meshes of that stage."""

    stage: int
    replica: int
    shard: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that trains the model: pipeline stages of FSDP (or HSDP) over tensor parallelism.

    Attributes:
        tp, pp, dp: the sizes of tensor, pipeline and sharded data parallelism.
        replicas: the number of replicas of all this, as of HSDP.
        half: whether the parameters are bfloat16, and their float32 values are the optimizer's.
        has_generators: whether every rank saves a value of its own.
        has_counter: whether rank 0 saves a tensor that no other rank has.
        is_flat: whether each rank holds a range of all elements in place of rows, as in ZeRO. Only
            with `tp=1` and `pp=1`.
    """

    tp: int
    pp: int
    dp: int
    replicas: int = 1
    half: bool = False
    has_generators: bool = False
    has_counter: bool = False
    is_flat: bool = False

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp * self.dp * self.replicas

    @property
    def text(self) -> str:
        """The sizes, as text."""
        sizes = [self.tp, self.pp, self.dp, *([self.replicas] if self.replicas > 1 else [])]
        return " × ".join(map(str, sizes))

    def place(self, rank: int) -> Coordinates:
        """Return the place of a rank."""
        rest, tp = divmod(rank, self.tp)
        rest, shard = divmod(rest, self.dp)
        stage, replica = divmod(rest, self.replicas)
        return Coordinates(stage, replica, shard, tp)

    def like(self, rank: int) -> int:
        """Return the first rank that has the same structure as a rank."""
        if self.is_flat:
            return rank
        first = self.place(rank).stage * (self.world // self.pp)
        return 1 if self.has_counter and rank > first == 0 else first

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank in its structure."""
        place = self.place(rank)
        return () if self.is_flat else (place.tp, place.shard)

    def state(self, rank: int) -> LocalState:
        """Return the state of a rank."""
        parameters = [*self.parameters(self.place(rank).stage)]
        leaves = [leaf for each in parameters for leaf in self._leaves(each, rank)]
        if self.has_counter and rank == 0:
            leaves.append(TensorLeaf("tokens", torch.int64, (), (_fragment(Box((), ()), 8),)))
        group = {"lr": 8e-5, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
        names = tuple(name for name, _, _ in parameters)
        return LocalState(
            leaves,
            {"step": 1000, "scheduler.last_epoch": 1000, "scheduler.base_lrs": [8e-5]},
            {"optimizer.param_groups": [(names, group)]},
            {"rng": "0" * BYTES_OF_GENERATORS} if self.has_generators else {},
        )

    def parameters(self, stage: int) -> Iterator[Parameter]:
        """Yield the parameters of a pipeline stage."""
        if stage == 0:
            yield "tok_embeddings.weight", (VOCAB, HIDDEN), COLUMN_PARALLEL
        for layer in np.array_split(np.arange(LAYERS), self.pp)[stage].tolist():
            for name, shape, dim in LAYER:
                yield f"layers.{layer}.{name}", shape, dim
        if stage == self.pp - 1:
            yield "norm.weight", (HIDDEN,), REPLICATED
            yield "output.weight", (VOCAB, HIDDEN), COLUMN_PARALLEL

    def _leaves(self, parameter: Parameter, rank: int) -> Iterator[TensorLeaf]:
        """Yield the leaves of a parameter and of its optimizer state."""
        name, shape, dim = parameter
        boxes, sharding = self._flat_boxes(name, rank), None
        if not self.is_flat:
            splits = self._splits(dim, self.place(rank))
            boxes = [box for box, _ in shard_boxes(shape, splits)]
            sharding = Sharding("mesh", splits)
        optimizer = f"optimizer.{name}"
        master = (f"{optimizer}.master",) if self.half else ()
        model = torch.bfloat16 if self.half else torch.float32
        leaf = partial(_leaf, shape=shape, boxes=boxes, sharding=sharding)
        yield leaf(f"model.{name}", model)
        for key in (*master, f"{optimizer}.exp_avg", f"{optimizer}.exp_avg_sq"):
            yield leaf(key, torch.float32)
        whole = _fragment(Box((), ()), 4)
        yield TensorLeaf(f"{optimizer}.step", torch.float32, (), (whole,), None, None, False, None)

    def _splits(self, dim: int | None, place: Coordinates) -> tuple[Split, ...]:
        """Return the splits of a parameter by FSDP2, after tensor parallelism has split `dim`."""
        shards = [ShardPlacement(0, 0, self.tp if dim == 0 and self.tp > 1 else 1)]
        if dim is not None:
            shards.append(ShardPlacement(1, dim))
        return splits_of((self.dp, self.tp), (place.shard, place.tp), shards)

    def _flat_boxes(self, name: str, rank: int) -> list[Box]:
        """Return the boxes of a rank's range of a parameter: parameters follow each other."""
        if not self.is_flat:
            return []
        begin, shape = self._begin_of[name]
        low, high = (self._elements * (rank + k) // self.world - begin for k in (0, 1))
        size = int(np.prod(shape))
        low, high = max(0, low), min(size, high)
        return [*boxes_of_range(shape, low, high)] if low < high else []

    @cached_property
    def _begin_of(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        begin, found = 0, {}
        for name, shape, _ in self.parameters(0):
            found[name] = begin, shape
            begin += int(np.prod(shape))
        return found

    @cached_property
    def _elements(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self._begin_of.values())


def _leaf(
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    sharding: Sharding | None,
) -> TensorLeaf:
    fragments = tuple(_fragment(box, dtype.itemsize) for box in boxes)
    return TensorLeaf(name, dtype, shape, fragments, None, None, False, sharding)


_ELEMENTS = {
    2: torch.zeros((), dtype=torch.bfloat16),
    4: torch.zeros(()),
    8: torch.zeros((), dtype=torch.int64),
}


def _fragment(box: Box, itemsize: int) -> Fragment:
    return Fragment(box, _ELEMENTS[itemsize].expand(box.shape))
