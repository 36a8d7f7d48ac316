"""Compare replicas: boxes that several ranks hold should have the same bytes on all of them.

Each rank computes a digest of each box that other ranks hold, too (`bit_sums.py`), and sends one
combined digest for each set of ranks that hold the same boxes, because equal digests become one on
their way to rank 0. Only if some differ, their owners send the digests of single boxes, so that
rank 0 can say which boxes differ, and on which ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes import Box
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.engine.rounds import Round, Values, combine_values, unite, values_of
from shardwise.kernel.engine.shared_structures import digest_of
from shardwise.kernel.errors import MismatchError, name_ranks
from shardwise.parts.checks.bit_sums import BitSums

Reaction = Literal["warn", "raise", "ignore"]
OnDivergence = Reaction | Mapping[str, Reaction]
_Place = tuple[str, tuple[int, ...], tuple[int, ...]]
"""The name of a tensor, and the offset and shape of a box."""
MOST_BOXES_SHOWN = 3
MOST_DIFFERING = 16
"""Of how many sets of ranks with different replicas the boxes are found."""
_CAUSES = (
    "ranks that should hold the same bytes do not, because of a hardware error, a missed "
    "all-reduce, different seeds, buffers that each rank updates alone, or kernels that are not "
    "deterministic"
)
_ADVICE = (
    "make them equal before saving (for example, broadcast them from rank 0), or save without "
    "check_replicas"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Boxes of a tensor that differ between ranks that should hold the same bytes.

    Attributes:
        step: the step of the save at which the boxes differed; None if it has none.
        tensor: the name of the tensor.
        boxes: the boxes that differ.
        groups: the ranks that hold the boxes, grouped by equal bytes; large groups first. If one
            rank holds two copies that differ, both groups are this rank.
    """

    step: int | None
    tensor: str
    boxes: tuple[Box, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that differ from more than half of the ranks; empty if there is no majority."""
        ranks = [rank for group in self.groups for rank in group]
        has_majority = 2 * len(self.groups[0]) > len(ranks)
        return tuple(sorted(ranks[len(self.groups[0]) :])) if has_majority else ()

    def __str__(self) -> str:
        shown = ", ".join(str(box) for box in self.boxes[:MOST_BOXES_SHOWN] if box.shape)
        if len(self.boxes) > MOST_BOXES_SHOWN:
            shown += f" and {len(self.boxes) - MOST_BOXES_SHOWN} more boxes"
        if self.groups[0] == self.groups[1]:
            differ = f"{name_ranks(self.groups[0])} holds two copies, which differ"
        elif self.minority:
            one = len(self.minority) == 1
            differ = f"{name_ranks(self.minority)} {'differs' if one else 'differ'} from "
            differ += name_ranks(self.groups[0])
        else:
            differ = f"{' and '.join(map(name_ranks, self.groups))} differ"
        return f"{self.tensor}{shown}: {differ}"


@dataclass(frozen=True, slots=True)
class DivergencePolicy:
    """What to do if the replicas of a tensor differ.

    Attributes:
        rules: pairs of a shell pattern and a reaction. The first pattern that matches the name of
            a tensor decides. Without a match, the reaction is "warn".
    """

    rules: tuple[tuple[str, Reaction], ...]

    @classmethod
    def from_option(cls, on_divergence: object) -> DivergencePolicy:
        """Return the policy of the option `on_divergence`.

        Raises:
            ValueError: a reaction is unknown.
            TypeError: the option is neither a reaction nor a dict.
        """
        given = {"*": on_divergence} if isinstance(on_divergence, str) else on_divergence
        if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
            raise TypeError(
                f'on_divergence={on_divergence!r}: expected "warn", "raise", "ignore", or a dict '
                'such as {"*.running_*": "ignore", "*": "raise"}'
            )
        for reaction in given.values():
            if reaction not in get_args(Reaction):
                raise ValueError(
                    f'on_divergence={on_divergence!r}: expected "warn", "raise" or "ignore", not '
                    f"{reaction!r}"
                )
        return cls(tuple(given.items()))

    @property
    def ignores_all(self) -> bool:
        """Whether no tensor is compared."""
        return bool(self.rules) and self.rules[0] == ("*", "ignore")

    def reaction_to(self, tensor: str) -> Reaction:
        """Return what to do if the replicas of a tensor differ."""
        matching = (reaction for pattern, reaction in self.rules if fnmatchcase(tensor, pattern))
        return next(matching, "warn")


def refuse_divergences(divergences: Sequence[Divergence], advice: str) -> None:
    """Raise if there are divergences.

    Raises:
        MismatchError: lists them, with the causes and the advice.
    """
    if divergences:
        step = divergences[0].step
        at = "" if step is None else f" at step {step}"
        raise MismatchError(
            f"replicas differ{at}: {_CAUSES}; {advice}:", [str(each) for each in divergences]
        )


def refuse_differing_replicas(planned: PlannedSave, group: Group) -> None:
    """Compare the replicas of all ranks. All ranks call this function together.

    Raises:
        MismatchError: replicas differ; the same error on all ranks.
    """
    refuse_divergences(find_divergences(planned, group), _ADVICE)


@prepare_decoding
class _Details(msgspec.Struct, array_like=True):
    """What a rank sends of the sets that differ. The keys of dicts are the numbers of the sets.

    Attributes:
        sums: the digest of each box, as little-endian 64-bit numbers.
        boxes: the boxes, from the first owner of a set only.
        own: the boxes of which this rank holds copies that differ.
    """

    sums: dict[int, bytes]
    boxes: dict[int, list[_Place]]
    own: list[_Place]


def find_divergences(
    planned: PlannedSave, group: Group, ignored: Collection[str] = ()
) -> tuple[Divergence, ...]:
    """Compare all bytes of the replicas of all ranks. All ranks call this function together.

    Args:
        planned: the save. The state is compared as it is now.
        group: the ranks.
        ignored: the names of tensors to leave out; the same on all ranks.

    Returns:
        The differences, the same on all ranks: all tensors of the first `MOST_DIFFERING` sets of
        ranks that hold different bytes.
    """
    description, fragments = planned.plan.description, planned.fragments
    names = description.structure.names
    left_out = np.array([name in ignored for name in names], bool)
    with Round(group, "comparing replicas") as all_ranks:
        sums = BitSums()
        own = _find_differing_copies(planned, sums, left_out)
        replicas = {
            each.set_id: each.fragment[~left_out[description.tensor[each.fragment]]]
            for each in planned.plan.replicas
        }
        found = {
            set_id: sums.of_all([fragments[i].data for i in rows.tolist()])
            for set_id, rows in replicas.items()
        }
        digests = {str(number): digest_of(each.tobytes()).hex() for number, each in found.items()}
        differing, has_own = all_ranks.all_reduce(
            (values_of(group.number, digests), bool(own)),
            tuple[Values, bool],
            _combine,
            _find_differing,
            tuple[dict[int, int], bool],
        )
    if not differing and not has_own:
        return ()
    with Round(group, "locating replicas that differ") as all_ranks:
        boxes = {
            number: [
                (names[description.tensor[i]], fragments[i].box.offset, fragments[i].box.shape)
                for i in replicas[number].tolist()
            ]
            for number, first in differing.items()
            if number in found and group.number == first
        }
        sent = {number: found[number].tobytes() for number in differing if number in found}
        return all_ranks.all_reduce(
            {group.number: _Details(sent, boxes, own)},
            dict[int, _Details],
            unite,
            lambda details: _name_divergences(details, planned.request.step),
            tuple[Divergence, ...],
        )


def _find_differing_copies(
    planned: PlannedSave, sums: BitSums, left_out: npt.NDArray[np.bool_]
) -> list[_Place]:
    """Return the boxes of which this rank holds copies that differ, for example in `sw.Shards`."""
    description, fragments = planned.plan.description, planned.fragments
    copies: dict[tuple[int, Box], list[int]] = {}
    for i, tensor in enumerate(description.tensor.tolist()):
        if not left_out[tensor]:
            copies.setdefault((tensor, fragments[i].box), []).append(i)
    differing = []
    for (tensor, box), rows in copies.items():
        if len(rows) > 1 and len({*sums.of_all([fragments[i].data for i in rows]).tolist()}) > 1:
            differing.append((description.structure.names[tensor], box.offset, box.shape))
    return differing


def _combine(messages: Sequence[tuple[Values, bool]]) -> tuple[Values, bool]:
    return combine_values([values for values, _ in messages]), any(own for _, own in messages)


def _find_differing(message: tuple[Values, bool]) -> tuple[dict[int, int], bool]:
    """Return the first sets of ranks with different digests, each with the first of its ranks."""
    digests, has_own = message
    found = {
        int(number): min(rank for ranks in by_digest.values() for rank in ranks)
        for number, by_digest in digests.items()
        if len(by_digest) > 1
    }
    return {number: found[number] for number in sorted(found)[:MOST_DIFFERING]}, has_own


def _name_divergences(details: Mapping[int, _Details], step: int | None) -> tuple[Divergence, ...]:
    """Return which boxes differ on which ranks.

    Args:
        details: what each rank has sent, by the number of the rank.
        step: the step of the save.
    """
    boxes: dict[tuple[str, tuple[tuple[int, ...], ...]], list[Box]] = {}
    for rank, own in sorted(details.items()):
        for name, offset, shape in own.own:
            boxes.setdefault((name, ((rank,), (rank,))), []).append(Box(offset, shape))
        for number, places in sorted(own.boxes.items()):
            ranks = sorted(r for r, each in details.items() if number in each.sums)
            table = np.stack([np.frombuffer(details[r].sums[number], "<u8") for r in ranks])
            for column in np.flatnonzero((table != table[0]).any(axis=0)).tolist():
                name, offset, shape = places[column]
                groups = group_ranks(ranks, table[:, column].tolist())
                boxes.setdefault((name, groups), []).append(Box(offset, shape))
    return tuple(
        Divergence(step=step, tensor=name, boxes=tuple(each), groups=groups)
        for (name, groups), each in boxes.items()
    )


def group_ranks(ranks: Sequence[int], sums: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks grouped by equal digests: large groups first, then by their first rank."""
    groups: dict[int, list[int]] = {}
    for rank, each in zip(ranks, sums, strict=True):
        groups.setdefault(each, []).append(rank)
    return tuple(sorted(map(tuple, groups.values()), key=lambda each: (-len(each), each[0])))
