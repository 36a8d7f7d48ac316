"""What a pickle's classes and functions become when it is read: names and inert values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Builder: TypeAlias = Callable[..., object]
"""Makes a value of the arguments in a pickle. They are not trusted: TypeError, ValueError,
LookupError, ArithmeticError or RuntimeError say that they make no sense. What is made must have no
method that a pickle could turn to harm, for it may be given items; and be flat, if it is hashed."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A name that stands for this value itself, as `torch.float32` does."""

    value: object


Stubs: TypeAlias = Mapping[str, Builder | Constant]
"""A closed list: dotted names, as pickles have them, and what becomes of each."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that is on the list, where a pickle has it as a value."""

    name: str
    build: Builder


@dataclass(frozen=True, slots=True)
class Opaque:
    """In place of a class or function that is not on the list, and of all that it would make."""

    name: str


@dataclass(slots=True, eq=False)
class Record:
    """In place of an instance of a class: its arguments and attributes, and none of its methods.

    A member of an enum has its value as the only argument, or its name if that is what was stored.
    """

    name: str
    args: tuple[object, ...] = ()
    fields: dict[str, object] = field(default_factory=dict)

    def set_state(self, state: object) -> None:
        """Take attributes as pickles have them: a dict, or a pair of that and those of slots.

        Raises:
            TypeError: they are no such thing.
        """
        parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
        for part in parts:
            if part is None:
                continue
            if not isinstance(part, dict) or not all(type(key) is str for key in part):
                raise TypeError(f"the attributes of a {self.name} are no names and values")
            self.fields.update(part)


def records(*names: str) -> Stubs:
    """Classes whose instances, or members, become records."""
    return {name: _record_of(name) for name in names}


def _record_of(name: str) -> Builder:
    return lambda *args: Record(name, args)
