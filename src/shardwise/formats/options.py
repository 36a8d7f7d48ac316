"""How to read a checkpoint. Opening a checkpoint of shardwise imports no reader."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import StateError
from shardwise.retention import Choice
from shardwise.state.tensors import is_instance

if TYPE_CHECKING:
    from shardwise.formats.specification import Specification

_SPECIFICATION = ("shardwise.formats.specification", "Specification")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """How to read a checkpoint; see `shardwise.open`.

    Attributes:
        spec: the specification of how to assemble the tensors.
        skip_unknown: skip pickled values of unknown classes instead of raising.
        format: the format to read if the directory has several.
        index: a file that keeps the layout of a foreign checkpoint.
        step: the selected step, if the place is the root of a run.
    """

    spec: Specification | None = None
    skip_unknown: bool = False
    format: str | None = None
    index: str | os.PathLike[str] | None = None
    step: Choice = "newest"

    def __post_init__(self) -> None:
        if self.spec is not None and not is_instance(self.spec, *_SPECIFICATION):
            raise StateError(f"spec={self.spec!r}: expected a specification; make one with sw.spec")


DEFAULT_OPTIONS = OpenOptions()
