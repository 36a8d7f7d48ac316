"""Integer arithmetic in specifications, over the numbers of ranks, layers and experts."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.kernel.errors import LayoutError

OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
}


@dataclass(frozen=True, slots=True)
class Environment:
    """The values that expressions are evaluated with.

    Attributes:
        values: captured numbers, coordinates of the rank, and numbers that `let` declares, by name.
        sizes: sizes of axes, and numbers that `let` declares, by name.
        starts_of_rows: for the axes of each ragged index, where each row starts. For example, the
            rows of the axes `(e, n)` have 3, 1 and 2 elements, one row for each `e`. They start at
            0, 3 and 4, so the element `n = 1` of the row `e = 2` has the index 5.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    starts_of_rows: Mapping[tuple[str, ...], Sequence[int]] = field(default_factory=dict)

    def value_of(self, name: str) -> int:
        """Return the value of a variable.

        Raises:
            LayoutError: the variable has no value.
        """
        if name not in self.values:
            raise LayoutError(f"{name} has no value: capture it, or declare it with `let`")
        return self.values[name]

    def size_of(self, axis: str) -> int:
        """Return the size of an axis.

        Raises:
            LayoutError: the size is unknown.
        """
        if axis not in self.sizes:
            raise LayoutError(
                f"the size of {axis} is unknown: give it with `where`, or declare it with `let`"
            )
        return self.sizes[axis]


@dataclass(frozen=True, slots=True)
class Expression:
    """A number, a name, an index, or an operation.

    Attributes:
        kind: an operator, or one of these:
            `number`: an integer, as in `4`.
            `name`: a captured number or text, a coordinate of the rank, or a declared number.
            `text`: a captured text that may contain dots, as in `rest*`.
            `size`: the size of an axis, as in `|tp|`.
            `index`: one index along several axes, the last of which varies fastest, as in `pp i`.
            `ragged`: an index whose last axis has another size at each position along the other
            axes, as in `pp ~i`.
        number: the value of a number.
        names: the names of a name, a size or an index.
        operands: the two operands of an operator.
    """

    kind: str
    number: int = 0
    names: tuple[str, ...] = ()
    operands: tuple[Expression, ...] = ()

    @property
    def is_name(self) -> bool:
        """Whether it is only a name, without arithmetic."""
        return self.kind in ("name", "text")

    def evaluate(self, environment: Environment) -> int:
        """Return the value.

        Raises:
            LayoutError: a variable has no value, a divisor is 0, or an index is out of range.
        """
        if self.kind == "number":
            return self.number
        if self.is_name:
            return environment.value_of(self.names[0])
        if self.kind == "size":
            return environment.size_of(self.names[0])
        if self.operands:
            left, right = (operand.evaluate(environment) for operand in self.operands)
            if self.kind in ("//", "%") and right == 0:
                raise LayoutError(
                    f"division by zero: {left} {self.kind} 0; correct the specification"
                )
            return int(OPERATORS[self.kind](left, right))
        *outer, last = self.names
        position = 0
        for axis in outer:
            position = position * environment.size_of(axis) + environment.value_of(axis)
        if self.kind == "ragged":
            return environment.starts_of_rows[self.names][position] + environment.value_of(last)
        return position * environment.size_of(last) + environment.value_of(last)

    def parts(self) -> Iterator[Expression]:
        """Yield the expression itself, and all operands."""
        yield self
        for operand in self.operands:
            yield from operand.parts()

    def variables(self) -> Iterator[str]:
        """Yield the names whose values the expression uses."""
        yield from (name for e in self.parts() if e.kind != "size" for name in e.names)

    def size_variables(self) -> Iterator[str]:
        """Yield the axes whose sizes the expression uses."""
        yield from (name for e in self.parts() if not e.is_name for name in e.names)

    def ragged_indices(self) -> Iterator[tuple[str, ...]]:
        """Yield the axes of each ragged index."""
        yield from (e.names for e in self.parts() if e.kind == "ragged")

    def __str__(self) -> str:
        if self.operands:
            return f"({self.operands[0]} {self.kind} {self.operands[1]})"
        if self.kind == "number":
            return str(self.number)
        text = " ".join(self.names)
        if self.kind == "ragged":
            return " ".join([*self.names[:-1], f"~{self.names[-1]}"])
        if self.kind == "text":
            return "*" if text.startswith("*") else f"{text}*"
        return f"|{text}|" if self.kind == "size" else text
