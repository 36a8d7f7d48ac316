"""Helpers for msgspec: types that several threads decode, and its errors for damaged bytes."""

from __future__ import annotations

from typing import TypeVar

import msgspec

Struct = TypeVar("Struct", bound=msgspec.Struct)
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that it cannot decode."""


def prepare_decoding(struct: type[Struct]) -> type[Struct]:
    """Let msgspec prepare a type, and the types of its fields, when the type is defined.

    msgspec 0.22 prepares a type when it is first decoded, and crashes if two threads do this at the
    same time.
    """
    msgspec.json.Decoder(struct)
    return struct
