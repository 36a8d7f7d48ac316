"""Specifications: how the arrays of all ranks make up global tensors. See docs/language.md."""

from shardwise.formats.language.grammar import parse
from shardwise.formats.language.lay import check, lay
from shardwise.formats.language.report import Report
from shardwise.formats.language.rules import Spec

__all__ = ["Report", "Spec", "check", "lay", "parse"]
