"""Checks of numbers that users pass as options."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from shardwise.kernel.errors import StateError


def check_integer(call_prefix: str, value: object, least: int = 1) -> int:
    """Return a number as an `int`, after checking that it is an integer and not too small.

    Args:
        call_prefix: the call up to the name of the argument, for the error message. For example,
            `"Keep(last"` gives `Keep(last=0)`.
        value: an integer of any type, for example NumPy's.
        least: the smallest allowed number.

    Raises:
        TypeError: the value is not an integer, or is a bool.
        ValueError: the value is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{call_prefix}={value!r}): expected an integer, not {type(value).__name__}"
        )
    integer = operator.index(value)
    if integer < least:
        raise ValueError(f"{call_prefix}={value!r}): expected at least {least}")
    return integer


def check_step(step: object) -> int:
    """Return a step as an `int`, after checking that it is an integer from 0.

    Raises:
        StateError: the step is not an integer from 0, or has more than 18 digits.
    """
    if isinstance(step, bool) or not isinstance(step, SupportsIndex):
        raise StateError(
            f"step={step!r}: expected an integer such as 1000, not {type(step).__name__}"
        )
    integer = operator.index(step)
    if not 0 <= integer < 10**18:
        raise StateError(f"step={integer}: expected an integer of at least 0, of at most 18 digits")
    return integer


def is_due(step: object, every: int) -> bool:
    """Return whether a step is a multiple of `every`.

    The result is also True if the step is invalid, so that the save starts and reports the error.
    """
    try:
        return check_step(step) % every == 0
    except StateError:
        return True
