"""The errors of reading pickles. Messages give the problem, its position and a remedy."""

from __future__ import annotations

import struct

from shardwise.errors import FormatError
from shardwise.state.hostile_keys import UnsafeValueError

MALFORMED_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""The exceptions that malformed pickles cause. A FormatError is a ValueError, too."""


class TruncatedError(FormatError):
    """The pickle continues after the end of the data."""


class UnknownClassError(FormatError):
    """The pickle contains objects of classes or functions that are not allowed.

    Attributes:
        names: the names of these classes and functions, as text.
    """

    def __init__(self, message: str, names: str = "") -> None:
        super().__init__(message)
        self.names = names


class UnsupportedValueError(FormatError):
    """The pickle is intact, but contains a value that is not read.

    Attributes:
        remedy: an action that the user can take.
    """

    def __init__(
        self,
        reason: str,
        remedy: str = "save tensors and plain values only, for example from state_dict()",
    ) -> None:
        super().__init__(reason)
        self.remedy = remedy


def explain_error(error: Exception, position: str) -> FormatError:
    """Return the error with the kind of the problem, its position and a remedy in its message."""
    if isinstance(error, UnsupportedValueError):
        return type(error)(f"{error} ({position}): this is not supported; {error.remedy}")
    if isinstance(error, UnsafeValueError):
        return FormatError(
            f"{error} ({position}): this is refused. If you trust it, load it with torch, and "
            "save it again with tensors and plain values only"
        )
    if isinstance(error, TruncatedError):
        return TruncatedError(
            f"the pickle is truncated, or contains a wrong length: {error} ({position}); "
            "copy the file again"
        )
    reason = "a value is missing" if isinstance(error, LookupError) else str(error)
    return FormatError(
        f"the pickle or its file is damaged: {reason} ({position}); copy the file again, or "
        "save it again"
    )
