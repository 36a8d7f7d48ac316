"""Detect leaks in a soak test: memory of agents, files, processes.

The number of files on a node has fixed limits, which reveal most leaks after a few cycles. A trend
over many cycles reveals slow growth.
"""

from __future__ import annotations

import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from tests.soak.trainer import SLOTS

MOST_SLOTS = 3 * (SLOTS + 1)
"""The slots of a node's current rank, and of up to two earlier ranks: their slots remain until
newer snapshots replace them."""
MOST_STEPS = SLOTS + 5
"""Committed snapshots, the one that is being written, and some that were never committed."""
MOST_HIDDEN = 8
"""Temporary files, including those of processes that were killed."""
MOST_FILES = 250
MOST_GROWTH = 8.0
MOST_OF_AGENT = 256.0
MOST_RATIO = 1.25
ENOUGH, WARM = 30, 20
"""Fewest samples for a trend, and the cycles before the first sample, in which nodes fill up."""


def names_below(folder: Path) -> list[str]:
    """Return the paths of files and directories below a folder; some may be deleted meanwhile."""
    return [
        Path(above, name).relative_to(folder).as_posix()
        for above, folders, files in os.walk(folder)
        for name in (*folders, *files)
    ]


def matches(name: str, pattern: str) -> bool:
    """Return whether each part of a path matches that of a pattern."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


@dataclass
class Use:
    """The memory (in MB) and the open files of an agent, one sample per cycle."""

    memory: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)


class Steadiness:
    """Checks for leaks after each cycle.

    Args:
        base: directory of all nodes.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._agents: dict[int, Use] = {}
        self._bytes: list[float] = []
        self._files: list[float] = []
        self._failures: list[str] = []
        self._most: dict[str, int] = {}
        self._leaks: dict[str, str] = {}
        self._looks = 0

    def begin_anew(self) -> None:
        """Record that all nodes are empty again."""
        self._looks = 0

    def look(self, agents: dict[str, list[int]]) -> None:
        """Take a sample of all agents and nodes."""
        for node, processes in agents.items():
            if len(processes) > 1:
                self._failures.append(f"{len(processes)} agents run for {node}")
            for process in processes:
                with suppress(OSError):
                    use = self._agents.setdefault(process, Use())
                    use.memory.append(anonymous(process))
                    use.files.append(len(list(Path(f"/proc/{process}/fd").iterdir())))
        for node in sorted(self._base.iterdir()):
            self._look_at(node)
        sizes = []
        for name in names_below(self._base):
            with suppress(OSError):
                sizes.append((self._base / name).stat().st_blocks * 512 / 1e6)
        self._looks += 1
        if self._looks > WARM:
            self._bytes.append(sum(sizes))
            self._files.append(len(sizes))

    def _look_at(self, node: Path) -> None:
        """Compare the files of a node with their limits."""
        counts = {
            "slots": (["free/r*-*", "step-*/r*.safetensors"], MOST_SLOTS),
            "parities": (["free/agent-*", "step-*/parity-*.bin"], MOST_STEPS),
            "snapshots": (["step-*"], MOST_STEPS),
            "hidden files": ([".*", "*/.*"], MOST_HIDDEN),
        }
        for run in node.glob("*/runs/*"):
            names = names_below(run)
            found_by_kind = {
                kind: (sum(matches(name, pattern) for pattern in patterns for name in names), most)
                for kind, (patterns, most) in counts.items()
            }
            found_by_kind["files"] = len(names), MOST_FILES
            for name, (found, most) in found_by_kind.items():
                self._most[name] = max(self._most.get(name, 0), found)
                if found > most:
                    self._leaks[name] = f"{found} {name} in {run}: the limit is {most}"

    def lines(self) -> list[str]:
        """Return a summary."""
        peak = max((max(use.memory) for use in self._agents.values()), default=0.0)
        growth = max((growth_of(use.memory) for use in self._agents.values()), default=0.0)
        files = max((max(use.files) for use in self._agents.values()), default=0)
        oldest = max((len(use.memory) for use in self._agents.values()), default=0)
        said = [
            f"agents: {len(self._agents)} in total, the longest ran for {oldest} cycles; at most "
            f"{peak:.0f} MB and {files} open files each; largest growth {growth:.0f} MB"
        ]
        said.append(
            "largest counts on a node: "
            + ", ".join(f"{count} {name}" for name, count in self._most.items())
        )
        if growth > MOST_GROWTH:
            said.append(f"WARNING: an agent grew by {growth:.0f} MB")
        for name, found in (("MB", self._bytes), ("files", self._files)):
            if found:
                first, last = thirds(found)
                said.append(
                    f"in memory: {first:.0f} {name} in the first third of the cycles, {last:.0f} "
                    f"in the last, at most {max(found):.0f}"
                )
        return said

    def failures(self) -> list[str]:
        """Return the leaks and other violations."""
        failures = [*self._failures, *self._leaks.values()]
        for process, use in self._agents.items():
            if max(use.memory) > MOST_OF_AGENT:
                failures.append(f"agent {process} used {max(use.memory):.0f} MB")
        for name, found in (("MB", self._bytes), ("files", self._files)):
            if len(found) >= ENOUGH:
                first, last = thirds(found)
                if last > MOST_RATIO * first:
                    failures.append(f"{name} in memory grew from {first:.0f} to {last:.0f}")
        return failures


def growth_of(memory: list[float]) -> float:
    """Return by how many MB an agent has grown; 0.0 if there are too few samples to tell.

    Compares the smallest samples of the first and of the last third, without those of the start.
    An agent that decodes the files of a lost node uses up to 50 MB more for a while. The
    difference of any two samples would show that.
    """
    warm = memory[len(memory) // 4 :]
    third = len(warm) // 3
    return min(warm[-third:]) - min(warm[:third]) if len(memory) >= ENOUGH else 0.0


def thirds(values: list[float]) -> tuple[float, float]:
    """Return the means of the first and of the last third."""
    third = max(1, len(values) // 3)
    return statistics.mean(values[:third]), statistics.mean(values[-third:])


def anonymous(process: int) -> float:
    """Return a process's anonymous memory in MB, without the snapshots that it maps."""
    for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
