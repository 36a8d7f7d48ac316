"""The interface through which a save compares replicas. `divergence` has the implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwise.engine.group import Group
from shardwise.engine.write_file import FileSource
from shardwise.events import Recorder
from shardwise.plan.save import SavePlan
from shardwise.state.local_state import Fragment
from shardwise.store.store import Buffer


class ReplicaSample(Protocol):
    """The boxes that a `ReplicaWatch` compares at one save."""

    @property
    def nbytes(self) -> int:
        """The bytes of the boxes."""
        ...

    @property
    def devices(self) -> frozenset[torch.device]:
        """The accelerators that hold some of the boxes."""
        ...

    @property
    def source(self) -> FileSource:
        """The bytes to copy."""
        ...

    def checksum_state(self) -> None:
        """Take the checksums of the present state."""
        ...

    def expect_copy(self) -> None:
        """Wait with the comparison until `checksum_copy` or `cancel` is called."""
        ...

    def checksum_copy(self, data: Buffer) -> None:
        """Take the checksums of a copy of the bytes."""
        ...

    def cancel(self) -> None:
        """Compare nothing at this save."""
        ...


class ReplicaWatch(Protocol):
    """Compares what several ranks hold, save after save. `divergence` has the implementation."""

    def encode_message(self) -> bytes:
        """Return this rank's message about its last sample."""
        ...

    def combine_messages(self, messages: Sequence[bytes]) -> bytes:
        """Return the message of some ranks together; the order does not matter."""
        ...

    def conclude(self, message: bytes, group: Group, recorder: Recorder) -> None:
        """Act on the differences between the last samples. All ranks call this together.

        Args:
            message: the combined message of all ranks.
            group: the ranks.
            recorder: gets an event if replicas differ.

        Raises:
            MismatchError: on all ranks: replicas differ, and the user wants an error.
        """
        ...

    def begin(
        self,
        save_id: str,
        step: int,
        plan: SavePlan,
        fragments: Sequence[Fragment],
    ) -> ReplicaSample | None:
        """Choose what to compare at a save; return None if this rank has nothing to compare."""
        ...
