"""What there is to say about a specification and a checkpoint, before any byte moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Whether a specification fits, and what it makes of a checkpoint.

    Attributes:
        source: what the specification is called.
        problems: all that is wrong, one line each; without any, every element of every tensor is
            there exactly once (or is a declared average), and every stored array is used or
            skipped.
        arrays, tensors: how many there are.
        replicas: how many pieces more than one rank has, and which can be compared.
        averages: how many tensors are the mean of several.
        skipped: names of arrays that were left out, each with the line that says so.
        unused: rules that matched nothing.
    """

    source: str
    problems: tuple[str, ...]
    arrays: int = 0
    tensors: int = 0
    replicas: int = 0
    averages: int = 0
    skipped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __str__(self) -> str:
        head = f"{self.source}: {self.arrays} arrays make up {self.tensors} tensors"
        if self.problems:
            head = f"{self.source} does not fit: {len(self.problems)} problem(s)"
        counted = (
            (self.replicas, "pieces are replicas of others"),
            (self.averages, "tensors are means"),
            (len(self.skipped), "names of arrays are skipped"),
        )
        lines = [f"  {number} {what}" for number, what in counted if number]
        lines += [f"  ✗ {problem}" for problem in self.problems]
        lines += [f"  unused: {rule}" for rule in self.unused]
        return "\n".join([head, *lines])
