"""The global tensors that stored arrays are of, by names made from theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.language.matching import Captured
from shardwise.formats.language.names import Template
from shardwise.formats.language.numbers import (
    Expression,
    Known,
    Name,
    evaluate,
    names_in,
    render,
    sizes_in,
)
from shardwise.manifest.table import Int

LARGEST_KEY = 2**62


class Tensors:
    """Tensors in the order in which they were first named.

    Attributes:
        names: of all.
        averages: which of them are hidden, each the value of one rank; by the name of their mean.
        computed: numbers that names were given by arithmetic, by the text before them.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.averages: dict[str, list[str]] = {}
        self.computed: dict[str, set[int]] = {}
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """The number of a tensor, which it is given if it has none yet."""
        found = self._index.setdefault(name, len(self.names))
        if found == len(self.names):
            self.names.append(name)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def add(
        self,
        template: Template,
        averages: Sequence[str],
        captured: Mapping[int, Captured],
        columns: tuple[Int, Mapping[str, Int]],
        known: Known,
    ) -> Int:
        """Name the tensors of many arrays.

        Args:
            averages: axes of the ranks each of which has a value of its own.
            captured: by the index of an array's name.
            columns: indices of names, and positions along axes.

        Returns:
            `(n,)`: numbers of the tensors.

        Raises:
            LayoutError: a name depends on something unknown.
        """
        names, positions = columns
        needed = dict.fromkeys([*template.names(), *averages])
        axes = [axis for axis in needed if axis in positions]
        first, inverse = _distinct([names, *(positions[axis] for axis in axes)])
        found = np.zeros(len(first), np.int64)
        for i, row in enumerate(first.tolist()):
            values = {axis: int(positions[axis][row]) for axis in axes}
            name = self._fill(template, captured[int(names[row])], replace(known, values=values))
            if averages:
                own = f"{name}#{','.join(f'{axis}={values[axis]}' for axis in averages)}"
                self.averages.setdefault(name, []).append(own)
                name = own
            found[i] = self.index(name)
        return found[inverse]

    def _fill(self, template: Template, captured: Captured, known: Known) -> str:
        said = ""
        for part in template.parts:
            if isinstance(part, str):
                said += part
            elif isinstance(part, Name) and part.name in captured:
                said += captured[part.name]
            else:
                number = evaluate(part, known)
                if number < 0:
                    raise LayoutError(f"{{{render(part)}}} is {number}, with {_given(part, known)}")
                if not isinstance(part, Name):
                    self.computed.setdefault(said, set()).add(number)
                said += str(number)
        return said


def _given(part: Expression, known: Known) -> str:
    used = {name: known.values[name] for name in names_in(part) if name in known.values}
    used |= {f"|{name}|": known.sizes[name] for name in sizes_in(part) if name in known.sizes}
    return ", ".join(f"{name} = {value}" for name, value in used.items())


def _distinct(columns: Sequence[Int]) -> tuple[Int, Int]:
    """Rows with the first of each distinct combination, and for all rows which one they have."""
    key = np.zeros_like(columns[0])
    most = 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        most *= size
        if most > LARGEST_KEY:
            raise LayoutError("absurdly large numbers in names")
        key = key * size + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
