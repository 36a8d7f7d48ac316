"""Options of a save and of a load, checked."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import SupportsIndex

from shardwise.errors import StateError
from shardwise.manifest.names import checked_name


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save; see `shardwise.save`."""

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
        """Check options, and return them.

        Raises:
            StateError: the step is not an integer from 0, or a metric is not a number.
        """
        step = None if step is None else checked_step(step)
        try:
            values = {checked_name(name): float(value) for name, value in (metrics or {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(f"metrics={metrics!r}: expected a dict of numbers") from error
        return cls(step=step, overwrite=overwrite, check_replicas=check_replicas, metrics=values)


def whole_number(what: str, value: object, least: int = 1) -> int:
    """Return an integer, given an integer of any type, such as NumPy's.

    Args:
        what: the beginning of the call, for the error message: `"Keep(last"`.

    Raises:
        TypeError: the value is not an integer, or is a bool.
        ValueError: the value is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{what}={value!r}): expected an integer")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{what}={value!r}): expected at least {least}")
    return number


def checked_step(step: object) -> int:
    """Return a step, given an integer of any type.

    Raises:
        StateError: the step is not an integer from 0, or has more than 18 digits.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise StateError(f"step={step!r}: expected an integer, not {type(step).__name__}")
    number = operator.index(step)
    if not 0 <= number < 10**18:
        raise StateError(f"step {number}: expected at least 0 and at most 18 digits")
    return number


def is_due(step: object, every: int) -> bool:
    """Return whether a step is a multiple of `every`, or invalid: the save then reports it."""
    try:
        return checked_step(step) % every == 0
    except StateError:
        return True
