"""What the parts of shardwise plug into its ports."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from shardwise.ports.built_in import BUILT_IN


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [(group, name, value) for group, parts in BUILT_IN.items() for name, value in parts.items()],
)
def test_every_part_can_be_imported(group: str, name: str, value: str) -> None:
    assert EntryPoint(name, value, group).load() is not None
