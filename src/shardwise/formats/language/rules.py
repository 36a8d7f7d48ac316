"""A parsed specification: rules, and the patterns and templates of names in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import Shape, axes_of
from shardwise.formats.language.expressions import Expression, Name, names_in, render, sizes_in
from shardwise.formats.language.text import Text

Matcher = Callable[[str], dict[str, str] | None]
Declared = Expression | tuple[Expression, ...]
WHOLE = Shape((), rest=0)
UNWRITTEN = Text("", "specification")


@dataclass(frozen=True, slots=True)
class Capture:
    """`{name}`: a word without dots, or a number if used as one. With `star`, any text."""

    name: str
    star: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names: literal text and captures, in order."""

    parts: tuple[str | Capture, ...]

    def captures(self) -> tuple[str, ...]:
        """Return the names of the captures. Unnamed stars are `*0`, `*1`, … by position."""
        found = (part.name for part in self.parts if isinstance(part, Capture))
        return tuple(dict.fromkeys(found))

    def matcher(self, numbers: Collection[str]) -> Matcher:
        """Return a function from a name to its captured texts, or to None if it does not match.

        Args:
            numbers: captures that match only digits.
        """
        names = list(self.captures())
        seen: set[str] = set()
        pieces = []
        for part in self.parts:
            if isinstance(part, str):
                pieces.append(re.escape(part))
            elif part.name in seen:
                pieces.append(f"(?:\\{names.index(part.name) + 1})")
            else:
                seen.add(part.name)
                kind = r"\d{1,9}" if part.name in numbers else ".+" if part.star else r"[^.]+"
                pieces.append(f"({kind})")
        compiled = re.compile("".join(pieces), re.DOTALL | re.ASCII)

        def match(name: str) -> dict[str, str] | None:
            found = compiled.fullmatch(name)
            return dict(zip(names, found.groups(), strict=True)) if found else None

        return match

    def __str__(self) -> str:
        return "".join(
            part if isinstance(part, str) else "*" if part.name[0] == "*" else _braced(part)
            for part in self.parts
        )


def _braced(capture: Capture) -> str:
    return "{" + capture.name + ("*" if capture.star else "") + "}"


@dataclass(frozen=True, slots=True)
class Template:
    """The name of a tensor: literal text and expressions. A `Name` may be a captured text."""

    parts: tuple[str | Expression, ...]

    def fill(self, texts: Mapping[str, str]) -> str:
        """Return the name, with captured texts filled in.

        Raises:
            LayoutError: the template contains arithmetic.
        """
        words = []
        for part in self.parts:
            if not isinstance(part, str | Name):
                raise LayoutError(f"{self}: the name of a tied tensor cannot contain arithmetic")
            words.append(part if isinstance(part, str) else texts[part.name])
        return "".join(words)

    def __str__(self) -> str:
        return "".join(p if isinstance(p, str) else f"{{{render(p)}}}" for p in self.parts)

    def names(self) -> tuple[str, ...]:
        """Return the captures, coordinates, axes and constants in the template."""
        holes = (part for part in self.parts if not isinstance(part, str))
        return tuple(dict.fromkeys(name for hole in holes for name in names_in(hole)))


def substitute(
    parts: tuple[str | Capture, ...], by: Mapping[str, tuple[str | Capture, ...]]
) -> tuple[str | Capture, ...]:
    """Return a pattern's parts with some captures replaced by the parts of another pattern."""
    found: list[str | Capture] = []
    for part in parts:
        own = by.get(part.name) if isinstance(part, Capture) else None
        found.extend((part,) if own is None else own)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Target:
    """A global tensor that a rule's arrays are parts of.

    Without `given`, its dimensions are those of the stored array.
    """

    name: Template
    given: Shape | None = None
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How stored arrays of one kind make up global tensors.

    Attributes:
        pattern: the pattern of the arrays' names.
        targets: the tensors.
        stored: the dimensions of the array; by default those of its target without the axes of
            ranks and of captured numbers.
        sizes: sizes of axes, from `where`.
        flat: axes of the ranks that divide the flattened tensors.
        average: axes of the ranks over which the tensor is the mean.
        dtype: the required dtype of the arrays, if any.
        on: coordinates of the ranks to which the rule applies.
        at: the index of the rule's first character in the text.
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
        """Return the axis expression of a tensor."""
        return target.given or self.stored or WHOLE

    def shapes(self) -> Iterator[Shape]:
        """Yield all axis expressions."""
        if self.stored is not None:
            yield self.stored
        for target in self.targets:
            yield self.shape_of(target)

    def axes(self) -> frozenset[str]:
        """Return the names of the axes in all axis expressions."""
        return frozenset(
            axis.name for shape in self.shapes() for dim in shape.dims for axis in axes_of(dim.node)
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Stored arrays that are left out."""

    pattern: Pattern
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Tie:
    """Further names of tensors: `head = embed`.

    With `unless_stored`, a name that has stored arrays is not tied.
    """

    name: Template
    of: Pattern
    unless_stored: bool = False
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Spec:
    """A specification. The first rule that a stored array matches applies to it.

    Attributes:
        ranks: the axes of the ranks, with their sizes where the text gives them.
        lets: declared numbers and lists; None where the program must give a value.
        rules: all rules in order, including those that follow others with `like`.
        ties: further names of tensors.
        text: the text that was parsed.
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
        """Return the captures that are numbers: those used as an axis or in arithmetic."""
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
