"""Which arrays of a model its optimizer has, in which groups: Megatron-LM counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.megatron_legacy.ranks import Rank

_BUFFERS = ("_extra_state", "expert_bias", "inv_freq", "local_tokens_per_expert")
_EMBEDDINGS = ("word_embeddings.weight", "output_layer.weight")

Settings: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a rank: the chunk of the model that has it, its name there, its weight."""

    chunk: int
    name: str
    array: StoredArray

    @property
    def of_expert(self) -> bool:
        """Whether it is of an expert, which not all data-parallel ranks have."""
        return ".experts." in self.name

    @property
    def decays(self) -> bool:
        """Whether its weight decays, as Megatron-LM has it: biases and norms do not."""
        return len(self.array.shape) != 1 and not self.name.endswith(".bias")

    @property
    def of_embedding(self) -> bool:
        """Whether it may have a learning rate of its own."""
        return self.name.endswith(_EMBEDDINGS)


def parameters_of(rank: Rank) -> list[Parameter]:
    """The parameters of a rank, in the module's order."""
    return [
        Parameter(chunk, name, array)
        for chunk, arrays in enumerate(rank.chunks)
        for name, array in arrays.items()
        if not name.endswith(_BUFFERS)
    ]


def of_optimizers(
    parameters: Sequence[Parameter], parts: Sequence[Sequence[Settings]]
) -> list[list[Parameter]] | None:
    """The parameters of each of an optimizer's parts, which are given by their param groups.

    A model with experts has an optimizer for these beside that of all others; interleaved stages
    may have one for the first chunk.

    Returns:
        None if it cannot be told.
    """
    expert = [bool(part) and all(_flag(g, "is_expert_parallel") for g in part) for part in parts]
    dense = len(parts) - sum(expert)
    if dense not in (1, 2) or sum(expert) > 1:
        return None
    shared = [p for p in parameters if not (p.of_expert and any(expert))]
    chunks: list[list[Parameter]] = [shared]
    if dense == 2:
        chunks = [[p for p in shared if p.chunk == 0], [p for p in shared if p.chunk]]
    rest = [p for p in parameters if p.of_expert]
    left = iter(chunks)
    return [rest if own else next(left) for own in expert]


def in_groups(
    parameters: Sequence[Parameter],
    groups: Sequence[Settings],
    fits: Callable[[Sequence[Sequence[Parameter]]], bool],
) -> list[list[Parameter]] | None:
    """The parameters of each param group, in the module's order.

    Args:
        fits: whether they may be these, by what else is known.

    Returns:
        None if it cannot be told.
    """
    keys = [_key(group) for group in groups]
    ways: list[list[tuple[bool, bool]]] = []
    if len(set(keys)) == len(keys):
        ways.append(keys)
    if len(groups) == 2:  # the order that Megatron-LM had before groups said what they are for
        ways.append([(True, False), (False, False)])
    if any(key[1] for key in keys):
        own = [lambda p: (p.decays, p.of_embedding)]
    else:
        own = [lambda p: (p.decays, False)]
    for way in ways:
        found = [[p for p in parameters if own[0](p) == key] for key in way]
        if sum(map(len, found)) == len(parameters) and fits(found):
            return found
    return [list(parameters)] if len(groups) == 1 and fits([parameters]) else None


def _key(group: Settings) -> tuple[bool, bool]:
    """Whether weights of a group decay, and whether they have a learning rate of their own."""
    factor = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay")))
    return factor != 0.0, _flag(group, "is_decoupled_lr") or group.get("default_config") is False


def _flag(group: Settings, key: str) -> bool:
    return group.get(key) is True
