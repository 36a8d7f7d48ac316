"""What is known of a checkpoint while rules are applied to it, and all that is found wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.expressions import Known, Value
from shardwise.formats.language.match import Matches, Tensors, captured_numbers, coordinate
from shardwise.formats.language.pieces import Block, Part
from shardwise.formats.language.rules import Rule, Skip, Spec, Target
from shardwise.manifest.table import Int

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(slots=True)
class Assembly:
    """Tensors as they are put together.

    Attributes:
        given: shapes of tensors that the caller knows.
        blocks: boxes of the tensors, by the rules that were applied so far.
        arrays: which tensors which rows of the catalogue are of, and the shape that follows.
        problems: all that is wrong.
    """

    spec: Spec
    catalogue: Catalogue
    matches: Matches
    known: Known
    given: Shapes
    tensors: Tensors = field(default_factory=Tensors)
    blocks: list[Block] = field(default_factory=list)
    arrays: list[tuple[Int, Int, tuple[int, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def rule(self, number: int) -> Rule:
        """A rule that is not a `skip`.

        Raises:
            LayoutError: it is one.
        """
        rule = self.spec.rules[number]
        if not isinstance(rule, Rule):
            raise LayoutError(f"rule {number} skips what it matches")
        return rule

    def line(self, rule: Rule | Skip) -> str:
        """Where a rule is written."""
        return f"{self.spec.text.source}:{self.spec.text.line(rule.at)}"

    def positions(self, number: int) -> dict[str, Int]:
        """Where a rule's arrays lie along the axes of ranks and captured numbers, as columns."""
        rows = self.matches.rows[number]
        ranks = {
            axis: coordinate(self.catalogue, axis)[rows] for axis in sorted(self.spec.rank_axes)
        }
        return ranks | captured_numbers(self.spec, self.catalogue, self.matches, number)

    def sizes(self, rule: Rule, declared: Mapping[str, Value]) -> dict[str, Value]:
        """What is known of the sizes of a rule's axes before its arrays are looked at."""
        own = self.spec.rank_axes | set(rule.pattern.captures())
        sizes = {name: size for name, size in self.known.sizes.items() if name in own}
        return {**self.known.constants, **sizes, **declared}

    def named(self, number: int, target: Target, part: Part) -> Int:
        """Which tensor each array of a part is of.

        Raises:
            LayoutError: a name depends on something unknown.
        """
        known = replace(self.known, sizes={**self.known.sizes, **part.sizes})
        columns = self.catalogue.name[part.rows], part.positions
        captured = self.matches.captured[number]
        texts = self.spec.numbers()
        words = {
            i: {name: text for name, text in found.items() if name not in texts}
            for i, found in captured.items()
        }
        return self.tensors.add(target.name, self.rule(number).average, words, columns, known)

    def note(self, part: Part, shape: tuple[int, ...]) -> None:
        """Remember the shape that a rule found the tensors of some arrays to have."""
        self.arrays.append((part.tensor, part.rows, shape))

    def complain(self, tensor: int, what: str) -> None:
        """Note that something is wrong with a tensor."""
        self.problems.append(f"{self.tensors.names[tensor]}: {what}")

    def reject(self, rows: Int, rule: Rule, what: str) -> None:
        """Note that a rule cannot be applied to stored arrays."""
        for i in np.unique(self.catalogue.name[rows]).tolist():
            self.problems.append(f"{self.catalogue.names[i]} ({self.line(rule)}): {what}")
