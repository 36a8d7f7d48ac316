"""Checkpoints of Megatron-LM with objects of unknown classes are never called damaged."""

from __future__ import annotations

from pathlib import Path

from tests.formats.foreign_goldens import unpacked
from tests.formats.test_unknown_classes import require_that_unknown_names_are_told

GOLDEN = Path(__file__).parent / "golden"


def test_each_unknown_name_in_a_checkpoint_is_told(tmp_path: Path) -> None:
    require_that_unknown_names_are_told(unpacked("megatron_legacy", tmp_path, golden=GOLDEN))
