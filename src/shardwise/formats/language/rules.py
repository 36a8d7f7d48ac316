"""Patterns that names match, and templates that make names of what was captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import Shape, axes_of
from shardwise.formats.language.expressions import Expression, Name, names_in, render, sizes_in
from shardwise.formats.language.text import Text

Matcher = Callable[[str], dict[str, str] | None]


@dataclass(frozen=True, slots=True)
class Capture:
    """`{name}`: a word without dots, or a number where it is counted with; `*` takes any text."""

    name: str
    star: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """Literal text and captures, in order."""

    parts: tuple[str | Capture, ...]

    def captures(self) -> tuple[str, ...]:
        """Names of the captures; a star without a name is `*0`, `*1`, … by its position."""
        found = (part.name for part in self.parts if isinstance(part, Capture))
        return tuple(dict.fromkeys(found))

    def matcher(self, numbers: Collection[str]) -> Matcher:
        """A function from a name to what it captures, or None.

        Args:
            numbers: captures that take only digits.
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
    """Literal text and expressions; one that is only the name of a capture may stand for text."""

    parts: tuple[str | Expression, ...]

    def fill(self, texts: Mapping[str, str]) -> str:
        """The name, where all of its captures stand for text.

        Raises:
            LayoutError: something is no capture.
        """
        words = []
        for part in self.parts:
            if not isinstance(part, str | Name):
                raise LayoutError("a name that is made of others cannot count")
            words.append(part if isinstance(part, str) else texts[part.name])
        return "".join(words)

    def __str__(self) -> str:
        return "".join(p if isinstance(p, str) else f"{{{render(p)}}}" for p in self.parts)

    def names(self) -> tuple[str, ...]:
        """All captures, coordinates, axes and constants that it takes."""
        holes = (part for part in self.parts if not isinstance(part, str))
        return tuple(dict.fromkeys(name for hole in holes for name in names_in(hole)))


def substitute(
    parts: tuple[str | Capture, ...], by: Mapping[str, tuple[str | Capture, ...]]
) -> tuple[str | Capture, ...]:
    """A pattern's parts with captures replaced by parts of another."""
    found: list[str | Capture] = []
    for part in parts:
        own = by.get(part.name) if isinstance(part, Capture) else None
        found.extend((part,) if own is None else own)
    return tuple(found)


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
