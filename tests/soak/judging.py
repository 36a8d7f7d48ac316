"""Judge the ranks of a cycle: which outcomes does the fault not explain, and which ranks hang?

A rank hangs if the ranks write nothing to the journal for a long time. A cycle on an overloaded
machine may last long, and is no failure while its ranks go on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from tests.soak.faults import Fault
from tests.soak.trainer import Line
from tests.tools.gang import Outcome

LONGEST_SILENCE = 90.0
"""Seconds in which no rank goes on. The time-outs of ranks are shorter: the longest is that of a
commit, a second more than twice `Memory(wait=…)`."""
LONGEST_CYCLE = 900.0
"""Seconds for a whole cycle."""
LONGEST_LINE = 300


def judged(
    outcomes: Sequence[Outcome], lines: Sequence[Line], kind: Fault, ended_at: float
) -> list[str]:
    """Return the outcomes that the fault does not explain.

    Args:
        outcomes: of all ranks.
        lines: the journal.
        kind: the fault.
        ended_at: when the cycle ended, by the clock of the journal.
    """
    raised = {line.rank: line.text for line in lines if line.what == "raised"}
    wrong = []
    for each in outcomes:
        text = raised.get(each.rank, each.report).strip()
        if each.kind == "hung":
            wrong.append(_why_killed(each.rank, lines, ended_at))
        elif _only_lost_ended_ranks(text, lines):
            continue
        elif each.kind != "value" and not (kind.ends_training and _is_expected(each, text)):
            said = text.splitlines()[-1] if text else ""
            wrong.append(f"rank {each.rank} {each.kind}: {said[:LONGEST_LINE]}")
    return wrong


def longest_silence(lines: Sequence[Line], ended_at: float) -> float:
    """Return the longest time, in seconds, in which no rank wrote to the journal."""
    times = sorted([line.at for line in lines if line.rank >= 0])
    return max((end - begin for begin, end in pairwise([*times, ended_at])), default=0.0)


def _why_killed(rank: int, lines: Sequence[Line], ended_at: float) -> str:
    """Say whether a rank that was killed at a limit hung, or was slow."""
    of_ranks = [line for line in lines if line.rank >= 0]
    own = [line for line in of_ranks if line.rank == rank]
    silent = ended_at - max((line.at for line in of_ranks), default=0.0)
    last = "it has written nothing"
    if own:
        last = (
            f"its last line, {ended_at - own[-1].at:.0f} s before its end: {own[-1].what} "
            f"{own[-1].step}"
        )
    if of_ranks and silent < LONGEST_SILENCE:
        return f"rank {rank} was too slow: the cycle took over {LONGEST_CYCLE:.0f} s; {last}"
    return f"rank {rank} hung: no rank went on for {LONGEST_SILENCE:.0f} s; {last}"


def _only_lost_ended_ranks(text: str, lines: Sequence[Line]) -> bool:
    """Return whether a rank failed because it waited for nodes whose ranks had already ended.

    If the fault has killed the agents of these nodes, no rank is there to start them again.
    """
    lost = {int(rank) for rank in re.findall(r"rank (\d+): its node \S+ is lost", text)}
    return bool(lost) and lost <= {line.rank for line in lines if line.what == "ended"}


def _is_expected(outcome: Outcome, text: str) -> bool:
    """Return whether a rank was killed or failed because another one was lost."""
    return outcome.signal is not None or "shardwise.kernel.errors." in text
