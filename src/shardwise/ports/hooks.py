"""Run hooks: what runs along with a `Checkpointer`.

A hook is told when a save begins, is staged or durable, when one fails, when a checkpoint is
restored, and when the run ends. The mirror and the comparison of replicas are hooks. A package adds
its own by an entry point of the group `shardwise.hooks`: a function that takes a `Run`, and returns
a `RunHook`, or None to stay out of this run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.events import OperationRecord
from shardwise.kernel.store import Store

GROUP = "shardwise.hooks"
ORIGINS = ("local memory", "other nodes", "decoded", "root", "mirror", "start")
"""The origins in a `RestoreReport`."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run of a Checkpointer.

    Attributes:
        root: the store of its checkpoints.
        rank: this rank.
        world_size: the number of ranks.
    """

    root: Store
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The result of `Checkpointer.restore`.

    Attributes:
        step: the step of the checkpoint that was loaded; None if the checkpoint has no step.
        source: "memory", "storage", or "start" (from `Checkpointer(start_from=…)`).
        load: the report of the load.
        skipped: newer steps, each with the reason why it was not loaded.
        origins: bytes that this rank read from "local memory", from the memory of "other nodes",
            "decoded" from the parity of a lost node, from the "root", from its "mirror", and from
            the "start" (`start_from`). If all bytes come from the root or the start, the numbers
            count bytes of tensors only. Otherwise, they also count checksums, per-rank values and
            bytes that turned out to be damaged.
        seconds: seconds of each phase on this rank, and `total`. The phases are "asking" the nodes
            and the root which steps they hold; "choosing" the newest complete step; "reading" the
            step, and decoding data of lost nodes; and "rebuilding": discarding newer steps and
            allocating memory for the next snapshots.
        unanswered: the nodes that did not answer and may hold a newer step, each with the reason.
        record: the events of the phases, and those of the load.
    """

    step: int | None
    source: str
    load: LoadReport
    skipped: tuple[tuple[int, str], ...]
    origins: dict[str, int]
    seconds: dict[str, float] = field(default_factory=dict)
    unanswered: dict[str, str] = field(default_factory=dict)
    record: OperationRecord = field(default_factory=OperationRecord)

    def __repr__(self) -> str:
        return f"<RestoreReport of step {self.step} from {self.source}>"

    def __str__(self) -> str:
        step = "no step" if self.step is None else f"step {self.step}"
        skipped = [f"skipped step {number}: {why}" for number, why in self.skipped]
        unanswered = [f"could not ask node {node}: {why}" for node, why in self.unanswered.items()]
        source = f"restored {step} from {self.source}"
        return "; ".join([source, str(self.load), *skipped, *unanswered])


class RunHook:
    """A hook of one rank. Derive a class from this one, and write the methods that you need.

    The training waits for each call, in the thread that called the Checkpointer. All ranks call
    `begun`, `staged`, `restored` and `closed` together, so these may communicate. Communicate in
    `begun` rather than in `staged`: ranks wait for each other there anyway, but end their copies at
    different times. `saved` and `failed` can come at different times on different ranks, and
    `failed` on some ranks only.

    If a method raises a `ShardwiseError`, the call of the Checkpointer raises it. Raise one only
    on all ranks together. Any other exception is logged, and the training continues.
    """

    def begun(self, step: int) -> None:
        """A save begins. The ranks have not agreed on it yet, so it may be refused."""

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """A save is about to return, and the training may continue.

        The state is copied. But with `Memory(overlap=True)`, the copy may still be in progress.

        Args:
            report: what is known of the save so far.
            durable: whether the checkpoint will be in the root. If not, it is a snapshot in memory.
        """

    def saved(self, step: int) -> None:
        """The checkpoint of a step is durable in the root.

        If agents complete a save in the background, this method is called during the next `save`,
        when a wait for the save ends, or when the run ends.
        """

    def failed(self, error: Exception) -> None:
        """A save failed: this one, or an earlier one in the background. The hook may add notes."""

    def restored(self, report: RestoreReport) -> None:
        """A checkpoint was loaded, and the training continues from it."""

    def closed(self, *, completed: bool) -> None:
        """The Checkpointer is closed. No call follows.

        Args:
            completed: whether all saves are durable. If not, the training failed, a save failed, or
                the agents complete the saves alone.
        """


MakeHook = Callable[[Run], RunHook | None]
"""What an entry point of the group `shardwise.hooks` names."""
