"""What the listing of a root says, also of a root that has no checkpoints yet."""

from __future__ import annotations

from typing import Any

import shardwise as sw


def steps_of(root: object) -> list[int | None]:
    """The steps that are committed in a tier."""
    try:
        listed = sw.list_checkpoints(root).checkpoints  # type: ignore[arg-type]
    except sw.CheckpointNotFoundError:
        return []
    return [each.step for each in listed if each.state == "committed"]


def mirror_of(root: object) -> Any:
    """What the listing of a root says of its mirror; None if nothing."""
    try:
        return sw.list_checkpoints(root).mirror  # type: ignore[arg-type]
    except sw.CheckpointNotFoundError:
        return None
