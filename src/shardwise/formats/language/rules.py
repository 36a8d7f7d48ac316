"""A specification as values: what a text of the language says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from shardwise.formats.language.axes import Shape, axes_of
from shardwise.formats.language.cursor import Text
from shardwise.formats.language.names import Capture, Pattern, Template
from shardwise.formats.language.numbers import Expression, Name, names_in, sizes_in

Declared = Expression | tuple[Expression, ...]
WHOLE = Shape((), rest=0)
UNWRITTEN = Text("", "specification")


@dataclass(frozen=True, slots=True)
class Target:
    """A global tensor that a rule's arrays are fragments of, or parts of fragments.

    Without `given`, its dimensions are those of the array, as the rule says or as they are.
    """

    name: Template
    given: Shape | None = None
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Stored arrays of one kind, and what they are of.

    Attributes:
        pattern: what their names match.
        stored: how they are laid out; without it, as `targets` say, less the indexed axes.
        sizes: of axes, by name.
        flat: axes of the ranks among which the array was divided after it was flattened.
        average: axes of the ranks whose mean the tensor is.
        dtype: what the arrays are stored as, if the rule says.
        on: coordinates of the ranks that have them.
        at: its first character in the text.
    """

    pattern: Pattern
    targets: tuple[Target, ...]
    stored: Shape | None = None
    sizes: tuple[tuple[str, Declared], ...] = ()
    flat: tuple[str, ...] = ()
    average: tuple[str, ...] = ()
    dtype: str | None = None
    on: tuple[tuple[str, Expression], ...] = ()
    at: int = field(default=0, compare=False)

    def shape_of(self, target: Target) -> Shape:
        """The axis expression of a tensor."""
        return target.given or self.stored or WHOLE

    def shapes(self) -> Iterator[Shape]:
        """All axis expressions."""
        if self.stored is not None:
            yield self.stored
        for target in self.targets:
            yield self.shape_of(target)

    def axes(self) -> frozenset[str]:
        """Names of all axes of all its expressions."""
        return frozenset(
            axis.name for shape in self.shapes() for dim in shape.dims for axis in axes_of(dim.node)
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Stored arrays that nobody wants."""

    pattern: Pattern
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Tie:
    """Names of tensors that are others under another name.

    Attributes:
        unless_stored: only names that no array is stored for.
    """

    name: Template
    of: Pattern
    unless_stored: bool = False
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Spec:
    """A specification. Of several rules that a stored array matches the first one counts.

    Attributes:
        ranks: the axes of the ranks, and their sizes where the text gives them.
        lets: declared numbers and lists; None where they must be given from outside.
        rules: in order; those that follow others (`like`) are among them already.
    """

    ranks: tuple[tuple[str, int | None], ...] = ()
    lets: tuple[tuple[str, Declared | None], ...] = ()
    rules: tuple[Rule | Skip, ...] = ()
    ties: tuple[Tie, ...] = ()
    text: Text = UNWRITTEN

    @property
    def rank_axes(self) -> frozenset[str]:
        """Names of the axes of the ranks."""
        return frozenset(name for name, _ in self.ranks)

    def numbers(self) -> frozenset[str]:
        """Captures that are numbers, in all rules: what is an axis, or is counted with."""
        counted: set[str] = set()
        for rule in self.rules:
            if isinstance(rule, Rule):
                counted |= rule.axes()
                for target in rule.targets:
                    for part in target.name.parts:
                        if not isinstance(part, str | Name):
                            counted |= {*names_in(part), *sizes_in(part)}
        captured = {
            part.name
            for rule in self.rules
            for part in rule.pattern.parts
            if isinstance(part, Capture) and not part.star
        }
        return frozenset(counted & captured)
