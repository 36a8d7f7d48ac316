"""The steps of a run that must be restorable, according to what its ranks have seen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tests.soak.trainer import Line

NONE = -1


class History:
    """The state of the run's snapshots, updated after each cycle.

    Attributes:
        source: source of the last cycle's restore; empty if it did not restore.
        lost: number of steps that the last cycle lost.
    """

    def __init__(self) -> None:
        self._saved_by: dict[int, int] = {}
        self._committed = self._protected = self._stored = NONE
        self._holders: set[str] = set()
        self._missing: set[str] = set()
        self.source = ""
        self.lost = 0

    def begin(self, nodes: Collection[str], alive: Collection[str]) -> None:
        """Begin a cycle on `nodes`; the agents of the nodes `alive` also respond."""
        self._missing |= self._holders - set(nodes) - set(alive)

    def learn(
        self, cycle: int, nodes: Collection[str], lines: Sequence[Line], lost: Collection[str]
    ) -> list[str]:
        """Record a cycle's journal and the nodes that it lost; return the errors in it."""
        wrong = [line.text for line in lines if line.what == "wrong"]
        self.source, self.lost = "", 0
        restored = {(line.step, line.text) for line in lines if line.what == "restored"}
        if len({step for step, _ in restored}) > 1:
            wrong.append(f"ranks restored different steps: {sorted(restored)}")
        for step, text in sorted(restored)[:1]:
            wrong += self._restored(step, text)
        for line in lines:
            if line.what == "saving":
                self._saved_by[line.step] = cycle
            elif line.what in ("committed", "protected", "over", "stored"):
                self._ended(line, nodes)
        self._missing |= self._holders & set(lost)
        return wrong

    def _restored(self, step: int, text: str) -> list[str]:
        cycle, source, skipped = (*text.split("; ", 2), "")[:3]
        self.source = source if step != NONE else "nothing"
        newest = max(self._saved_by, default=NONE)
        self.lost = max(0, newest - max(step, 0))
        least = self._least()
        wrong = []
        if step < least:
            wrong.append(
                f"restored step {step} from {self.source}, but step {least} must be restorable: "
                f"committed {self._committed}, protected {self._protected}, stored {self._stored},"
                f" nodes missing: {len(self._missing)}; skipped: {skipped}"
            )
        elif step != NONE and self._saved_by.get(step) != int(cycle):
            by = self._saved_by.get(step)
            wrong.append(f"restored step {step} of cycle {cycle}, but cycle {by} saved it again")
        self._saved_by = {each: by for each, by in self._saved_by.items() if each <= step}
        self._committed = step
        self._protected = self._stored if self._missing else min(self._protected, step)
        if source == "storage":
            self._protected = self._stored = step
        return wrong

    def _least(self) -> int:
        """Return the oldest step that may be restored, given the missing nodes."""
        if not self._missing:
            return max(self._committed, self._stored)
        return max(self._protected, self._stored) if len(self._missing) == 1 else self._stored

    def _ended(self, line: Line, nodes: Collection[str]) -> None:
        self._holders, self._missing = set(nodes), set()
        self._committed = max(self._committed, line.step)
        if line.what != "committed":
            self._protected = max(self._protected, line.step)
        if line.what == "stored":
            self._stored = max(self._stored, line.step)
