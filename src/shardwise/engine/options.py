"""How to save and to load, as a user says it, checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex

from shardwise.errors import StateError
from shardwise.manifest.names import checked_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save; see `shardwise.save`."""

    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def checked(
        cls,
        step: SupportsIndex | None,
        overwrite: bool,
        check_replicas: bool,
        metrics: Mapping[str, float] | None,
    ) -> SaveOptions:
        """Options as a user gives them.

        Raises:
            StateError: the step is no whole number from 0 on, or a metric is no number.
        """
        step = None if step is None else checked_step(step)
        try:
            values = {checked_name(name): float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"metrics={metrics!r}: a dict of numbers is needed") from error
        return cls(step=step, overwrite=overwrite, check_replicas=check_replicas, metrics=values)


def whole_number(what: str, value: object, least: int = 1) -> int:
    """A number as a user gives it, such as NumPy's integers.

    Raises:
        TypeError: it is not an integer, or it is a bool.
        ValueError: it is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what}={value!r}): expected an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{what}={value!r}): expected at least {least}")
    return number


def checked_step(step: object) -> int:
    """A step as a user gives it.

    Raises:
        StateError: it is no whole number from 0 on.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise StateError(f"step={step!r}: expected an integer, not {type(step).__name__}")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise StateError(f"step {number}: expected at least 0 and at most 18 digits")
    return number


def is_due(step: object, every: int) -> bool:
    """Whether a step is a multiple of this. What is no step is due: so all ranks hear of it."""
    try:
        return checked_step(step) % every == 0
    except StateError:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load; see `shardwise.load`."""

    strict: bool = True
    cast: bool = False
    verify: bool = True
