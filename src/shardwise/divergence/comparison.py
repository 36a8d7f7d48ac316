"""Compares replicas: at each save, their owners compare checksums of a part of them.

At a save, `replica_sets.py` chooses the part, which is the same on all owners. Each owner copies
the part at the same moment as the state, and takes checksums of the copy afterwards. With
its next save, it sends a digest of these checksums to rank 0. Only if digests differ do the owners
send the checksums themselves, so that rank 0 can say which boxes differ, and on which ranks.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.divergence.differences import (
    Divergence,
    DivergencePolicy,
    SampleDetails,
    SetDigest,
    combine_digests,
    combine_sums,
    encode_sum,
    find_differing_sets,
    find_divergences,
    has_difference,
    keep_differing,
)
from shardwise.divergence.replica_sets import (
    ReplicaSet,
    choose_pieces,
    leave_out_tensors,
    most_bytes_compared,
    replica_sets_of,
    saves_per_round,
)
from shardwise.engine.buffers import aligned_buffer
from shardwise.engine.group import Group
from shardwise.engine.rounds import Round, unite
from shardwise.engine.write_file import FileSource
from shardwise.errors import MismatchError
from shardwise.events import Recorder
from shardwise.manifest.checksums import crc32
from shardwise.plan.save import SavePlan
from shardwise.plan.structure import Description
from shardwise.state.local_state import Fragment
from shardwise.store.store import Buffer

CHECKSUM_TIMEOUT = 60.0  # seconds
ADVICE = (
    "ranks that should hold the same bytes do not, because of a hardware error, a missed "
    "all-reduce, different seeds, buffers that each rank updates alone, or kernels that are not "
    'deterministic; load an earlier step, or pass on_divergence={"PATTERN": "ignore"} for tensors '
    "that may differ:"
)
log = logging.getLogger("shardwise")


class ReplicaSample:
    """The boxes that this rank compares at one save.

    `checksum_state` takes their checksums at once. To take them in another thread, call
    `expect_copy`, copy the bytes of `source`, and pass the copy to `checksum_copy`, or call
    `cancel`. If no checksums are taken, the other ranks compare without this rank.

    Args:
        save_id, step: the save.
        comparison_number: chooses the part of each set that is compared; see `choose_ranges`.
        source: the bytes of the boxes, one after the other.
        sets: the sets of replicas that the boxes belong to.
        set_starts: the index of the first box of each set; the last item is the number of all
            boxes.
        description: the fragments of this rank.

    Attributes:
        nbytes: the bytes of the boxes.
        devices: the accelerators that hold some of the boxes.
    """

    def __init__(
        self,
        save_id: str,
        step: int,
        comparison_number: int,
        source: FileSource,
        sets: Sequence[ReplicaSet],
        set_starts: Sequence[int],
        description: Description,
    ) -> None:
        self.save_id, self.step, self.comparison_number = save_id, step, comparison_number
        self.nbytes, self.devices = source.entry.size, source.devices
        self.sets = sets
        self._boxes = {s.set_id: slice(*b) for s, b in zip(sets, pairwise(set_starts), strict=True)}
        self._source: FileSource | None = source
        self._pieces = source.pieces
        self._description = description
        self._checksums: npt.NDArray[np.uint32] | None = None
        self._ended = threading.Event()
        self._ended.set()

    @property
    def source(self) -> FileSource:
        """The bytes to copy."""
        if self._source is None:
            raise RuntimeError(
                f"step {self.step}: the boxes to compare were already freed: please report this "
                "error of shardwise"
            )
        return self._source

    def checksum_state(self) -> None:
        """Take the checksums of the present state."""
        copy = aligned_buffer(self.nbytes)
        self.source.fill(0, self.nbytes, copy)
        self.checksum_copy(copy)

    def expect_copy(self) -> None:
        """Let `checksums` wait until another thread has called `checksum_copy` or `cancel`."""
        self._ended.clear()

    def checksum_copy(self, data: Buffer) -> None:
        """Take a checksum of each box, from a copy of the sample's bytes."""
        view = data.data
        bounds = pairwise(self._pieces.start.tolist())
        self._checksums = np.array([crc32(view[low:high]) for low, high in bounds], np.uint32)
        self.cancel()

    def cancel(self) -> None:
        """Free the tensors. No checksums follow."""
        self._source = None
        self._ended.set()

    @property
    def has_checksums(self) -> bool:
        """Whether the checksums were taken."""
        return self._checksums is not None

    def key_of(self, replicas: ReplicaSet) -> tuple[int, int]:
        """Return the number of a set, and which part of the set's bytes this sample has."""
        return replicas.set_id, self.comparison_number % saves_per_round(replicas.owner_count)

    def checksums(self) -> dict[int, bytes]:
        """Wait for the checksums, and return the checksums of each set, by the set's number."""
        if not self._ended.wait(CHECKSUM_TIMEOUT):
            log.warning(
                "step %d: the checksums of replicas are not ready after %d s, so this rank is not "
                "compared with others",
                *(self.step, CHECKSUM_TIMEOUT),
            )
        found = self._checksums
        if found is None:
            return {}
        return {number: found[boxes].tobytes() for number, boxes in self._boxes.items()}

    def boxes_of(self, number: int) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Return the tensor, offset and shape of each box of a set, by the set's number."""
        rows = list(self._pieces.describe_pieces(self._description))[self._boxes[number]]
        return [(name, box.offset, box.shape) for name, _, _, box in rows]


class ReplicaComparison:
    """Compares the replicas of this rank with the replicas of other ranks, save after save.

    All ranks create it together, and call its methods together. The comparison of a save ends at
    the next save, or in `compare_last`.

    Args:
        policy: what to do if replicas differ.

    Attributes:
        divergences: the differences that the last comparison found.
    """

    def __init__(self, policy: DivergencePolicy) -> None:
        self.divergences: tuple[Divergence, ...] = ()
        self._policy = policy
        self._plan: SavePlan | None = None
        self._sets: tuple[ReplicaSet, ...] = ()
        self._comparison_number: int | None = None
        self._comparisons = 0
        self._sample: ReplicaSample | None = None
        # By the number of a set and the number of a part of it: the step at which all replicas of
        # this part were last equal.
        self._equal_at: dict[tuple[int, int], int] = {}
        self._logged_at: dict[tuple[str, tuple[tuple[int, ...], ...]], int] = {}

    def begin(
        self,
        save_id: str,
        step: int,
        plan: SavePlan,
        fragments: Sequence[Fragment],
    ) -> ReplicaSample | None:
        """Choose what to compare at a save; return None if this rank has nothing to compare.

        Args:
            save_id, step: the save.
            plan: the plan of the save.
            fragments: the fragments in the plan's description, with their memory.
        """
        self._use_plan(plan)
        # The first number, and so the first part, is random. A run that restarts often would
        # otherwise compare only the first parts.
        number = self._comparison_number
        self._comparison_number = int(save_id[:8], 16) if number is None else number + 1
        self._comparisons += 1
        if not self._sets:
            return None
        pieces, set_starts = choose_pieces(self._sets, plan.description, self._comparison_number)
        source = FileSource(pieces, fragments)
        self._sample = ReplicaSample(
            save_id, step, self._comparison_number, source, self._sets, set_starts, plan.description
        )
        return self._sample

    def most_bytes(self, plan: SavePlan) -> int:
        """Return the largest number of bytes that this rank compares at a save with this plan."""
        self._use_plan(plan)
        return sum(map(most_bytes_compared, self._sets))

    def _use_plan(self, plan: SavePlan) -> None:
        """Compare the sets of replicas of a plan from now on."""
        if self._plan is plan:
            return
        description = plan.description
        ignored = [
            self._policy.reaction_to(name) == "ignore" for name in description.structure.names
        ]
        sets = [leave_out_tensors(each, ignored, description) for each in replica_sets_of(plan)]
        self._plan, self._sets = plan, tuple(each for each in sets if each.nbytes)
        self._comparison_number, self._equal_at = None, {}

    def encode_message(self) -> bytes:
        """Return this rank's message about its last sample, for `conclude`."""
        sample = self._sample
        if sample is None:
            return b""
        digests = _digests_of(sample)
        sets = [each for each in sample.sets if each.set_id in digests]
        return encode_sum(
            _key_of(sample),
            {s.set_id: (digests[s.set_id], s.owner_count, s.is_first_owner) for s in sets},
        )

    def combine_messages(self, messages: Sequence[bytes]) -> bytes:
        """Combine the messages of some ranks, in any order."""
        return combine_sums(messages)

    def conclude(
        self,
        message: bytes,
        group: Group,
        recorder: Recorder,
    ) -> None:
        """End the comparison of the last sample. All ranks call this together.

        Args:
            message: the combined message of all ranks.
            group: the ranks.
            recorder: gets an event `divergence` if replicas differ.

        Raises:
            MismatchError: on all ranks: replicas differ, and the policy is to raise.
        """
        sample, self._sample = self._sample, None
        self.divergences = ()
        differing = _find_differing(sample, group) if has_difference(message) else {}
        if differing:
            with recorder.stage("divergence"):
                self.divergences = self._locate(sample, differing, group)
        # Remember when each part was last equal, for `Divergence.equal_at`.
        if sample is not None and sample.has_checksums:
            for each in sample.sets:
                if each.set_id in differing:
                    self._equal_at.pop(sample.key_of(each), None)
                else:
                    self._equal_at[sample.key_of(each)] = sample.step
        self._react(group)

    def compare_last(self, group: Group, recorder: Recorder) -> None:
        """Compare the last sample now, because no save follows. All ranks call this together.

        Raises:
            MismatchError: as for `conclude`.
        """
        if group.size == 1 or self._policy.ignores_all:
            return
        with Round(group, "comparing replicas") as all_ranks:
            message = all_ranks.all_reduce(self.encode_message(), bytes, self.combine_messages)
        self.conclude(message, group, recorder)

    def forget(self) -> None:
        """Forget the last sample, because the state was replaced."""
        self._sample, self._equal_at = None, {}

    def _locate(
        self, sample: ReplicaSample | None, differing: Mapping[int, int], group: Group
    ) -> tuple[Divergence, ...]:
        """Return which boxes differ, and on which ranks."""
        with Round(group, "locating replicas that differ") as all_ranks:
            details = dict[int, SampleDetails]()
            if sample is not None:
                details[group.rank] = self._describe(sample, differing, group.rank)
            return all_ranks.all_reduce(
                details,
                dict[int, SampleDetails],
                unite,
                lambda all_details: find_divergences(all_details, differing),
                tuple[Divergence, ...],
            )

    def _describe(
        self, sample: ReplicaSample, differing: Mapping[int, int], rank: int
    ) -> SampleDetails:
        """Return the checksums of this rank for the sets that differ."""
        checksums = sample.checksums()
        keys = {
            each.set_id: sample.key_of(each)
            for each in sample.sets
            if each.set_id in differing and each.set_id in checksums
        }
        return SampleDetails(
            sample.step,
            {number: checksums[number] for number in keys},
            {number: sample.boxes_of(number) for number in keys if differing[number] == rank},
            {n: self._equal_at[key] for n, key in keys.items() if key in self._equal_at},
        )

    def _react(self, group: Group) -> None:
        raised = [
            each for each in self.divergences if self._policy.reaction_to(each.tensor) == "raise"
        ]
        if raised:
            raise MismatchError(_summarize(raised), [str(each) for each in raised])
        new = [each for each in self.divergences if self._is_new(each)]
        if new and group.rank == 0:
            log.warning("%s", MismatchError(_summarize(new), [str(each) for each in new]))

    def _is_new(self, divergence: Divergence) -> bool:
        """Return whether to log a difference: the last `saves_per_round` saves did not log it."""
        key = divergence.tensor, divergence.groups
        saves = saves_per_round(sum(map(len, divergence.groups)))
        logged_at = self._logged_at.get(key)
        if logged_at is not None and self._comparisons - logged_at < saves:
            return False
        self._logged_at[key] = self._comparisons
        return True


def _key_of(sample: ReplicaSample) -> str:
    """Return a key that is equal for samples of the same boxes."""
    return f"{sample.save_id} {sample.comparison_number}"


def _digests_of(sample: ReplicaSample) -> dict[int, bytes]:
    """Return a digest of the checksums of each set, by its number."""
    checksums = sample.checksums().items()
    return {number: hashlib.blake2b(sums, digest_size=16).digest() for number, sums in checksums}


def _find_differing(sample: ReplicaSample | None, group: Group) -> dict[int, int]:
    """Return the numbers of the sets that differ, with the first rank of each, on all ranks."""
    with Round(group, "finding replicas that differ") as all_ranks:
        own = b""
        if sample is not None and (digests := _digests_of(sample)):
            sets = {number: SetDigest(each, group.rank) for number, each in digests.items()}
            own = msgspec.msgpack.encode({_key_of(sample): sets})
        message = all_ranks.all_reduce(own, bytes, combine_digests, keep_differing, bytes)
    return find_differing_sets(message)


def _summarize(divergences: Sequence[Divergence]) -> str:
    steps = sorted({each.step for each in divergences})
    shown = f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"replicas differ at {shown}: {ADVICE}"
