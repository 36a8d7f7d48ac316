"""Which model-parallel ranks there are, and how wide the model's parts are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import FormatError
from shardwise.formats.readers.megatron_legacy.ranks import Rank

_FIRST, _SECOND = ("linear_fc1", "dense_h_to_4h"), ("linear_fc2", "dense_4h_to_h")
ARGS_OF_AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The axes of the ranks.

    Attributes:
        axes: their sizes: tp, pp, ep, and vp: the chunks of the model that a stage has.
        with_experts: the second of two numbers is that of a rank's experts.
        gates: 2 if feed-forward parts are gated, or else 1.
    """

    axes: Mapping[str, int]
    with_experts: bool
    gates: int

    def coordinate(self, rank: Rank, chunk: int) -> tuple[int, ...]:
        """Where an array of a chunk lies along the axes."""
        return (*_three(rank, with_experts=self.with_experts), chunk)

    def chunk(self, rank: Rank, chunk: int) -> tuple[int, ...]:
        """The same, whatever experts the rank has."""
        tensor, stage, _ = _three(rank, with_experts=self.with_experts)
        return tensor, stage, chunk

    def pipeline(self, rank: Rank) -> tuple[int, int]:
        """The stage of a rank, and how many there are."""
        return _three(rank, with_experts=self.with_experts)[1], self.axes["pp"]


def axes_of_numbers(rank: Rank) -> tuple[str, ...]:
    """Which axes the numbers of a rank's directory count."""
    args = rank.args
    if len(rank.numbers) == 2 and _size(args, "pp") == 1 and (_size(args, "ep") or 1) > 1:
        return "tp", "ep"
    return tuple(ARGS_OF_AXES)[: len(rank.numbers)]


def geometry_of(ranks: Sequence[Rank], where: str) -> Geometry:
    """What the names of directories, shapes and arguments say.

    Raises:
        FormatError: these contradict each other.
    """
    args = ranks[0].args
    with_experts = axes_of_numbers(ranks[0]) == ("tp", "ep")
    coordinates = [_three(rank, with_experts=with_experts) for rank in ranks]
    sizes = [max(column) + 1 for column in zip(*coordinates, strict=True)]
    axes = dict(zip(ARGS_OF_AXES, sizes, strict=True))
    for axis, size in axes.items():
        said = _size(args, axis)
        if said is not None and said != size:
            raise FormatError(
                f"{where}: {ARGS_OF_AXES[axis]} was {said}, and there are {size} ranks"
            )
    chunks = {len(rank.chunks) for rank in ranks}
    if len(chunks) > 1:
        raise FormatError(f"{where}: ranks have different numbers of chunks of the model")
    _check_experts(ranks, axes, where)
    gates = {n for rank in ranks for n in _gates(rank)} or {1}
    if len(gates) > 1:
        raise FormatError(f"{where}: some feed-forward parts are gated, and some are not")
    return Geometry({**axes, "vp": chunks.pop()}, with_experts, gates.pop())


def _three(rank: Rank, *, with_experts: bool) -> tuple[int, int, int]:
    numbers = rank.numbers
    if with_experts:
        return numbers[0], 0, numbers[1]
    tensor, stage, expert = (*numbers, 0, 0)[:3]
    return tensor, stage, expert


def _size(args: Mapping[str, Any], axis: str) -> int | None:
    found = args.get(ARGS_OF_AXES[axis])
    return found if type(found) is int else None


def _check_experts(ranks: Sequence[Rank], axes: Mapping[str, int], where: str) -> None:
    own = ranks[0].args.get("expert_tensor_parallel_size")
    experts = any(".experts." in name for chunk in ranks[0].chunks for name in chunk)
    if experts and type(own) is int and own != axes["tp"]:
        raise FormatError(
            f"{where}: experts are divided among {own} ranks and all else among {axes['tp']} "
            "(expert_tensor_parallel_size), which is not read here"
        )
    version = ranks[0].values.get("checkpoint_version", 3.0)
    if not isinstance(version, (int, float)) or version < 2:
        raise FormatError(
            f"{where}: queries, keys and values are in the order of checkpoint version {version}; "
            "only those from 2.0 on are read here"
        )


def _gates(rank: Rank) -> set[int]:
    """How much larger the first layers of feed-forward parts are than the second want them."""
    found = set()
    for chunk in rank.chunks:
        for name, array in chunk.items():
            for first, second in zip(_FIRST, _SECOND, strict=True):
                other = chunk.get(name.replace(f".{first}.weight", f".{second}.weight"))
                if f".{first}.weight" not in name or other is None:
                    continue
                if len(array.shape) != 2 or len(other.shape) != 2 or not other.shape[1]:
                    raise FormatError(f"{rank.where}: {name} is no matrix")
                found.add(array.shape[0] // other.shape[1])
    return found
