"""Specifications say how the arrays of all ranks make up global tensors. See docs/language.md."""

from shardwise.formats.language.apply import apply_spec
from shardwise.formats.language.parser import parse
from shardwise.formats.language.rules import Spec

__all__ = ["Spec", "apply_spec", "parse"]
