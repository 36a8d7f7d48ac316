"""A small language that says how the arrays of all ranks make up global tensors: docs/language.md.

text ──parse──▶ Spec ──lay──▶ Foreign          reading: over a catalogue of stored arrays
                  └──arrange──▶ Arrangement    writing: the arrays that each rank's file has
"""

from shardwise.formats.language.arrange import Arrangement, arrange
from shardwise.formats.language.grammar import parse
from shardwise.formats.language.lay import check, lay
from shardwise.formats.language.report import Report
from shardwise.formats.language.rules import Spec

__all__ = ["Arrangement", "Report", "Spec", "arrange", "check", "lay", "parse"]
