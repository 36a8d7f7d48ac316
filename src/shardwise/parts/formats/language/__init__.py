"""Specifications say how the arrays of all ranks make up global tensors. See docs/language.md."""

from shardwise.parts.formats.language.apply import apply_spec
from shardwise.parts.formats.language.parser import parse
from shardwise.parts.formats.language.rules import Spec

__all__ = ["Spec", "apply_spec", "parse"]
