"""The folder of a run: its checkpoints, and those of torchtitan's own back end."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

import shardwise as sw

_DCP_DIRECTORY = re.compile(r"step-(\d{1,15})")


def find_newest_step(folder: str) -> int | None:
    """Return the newest step of this run in storage, or None."""
    try:
        return sw.open(folder).step
    except sw.CheckpointNotFoundError:
        return None


def list_dcp_steps(folder: str) -> set[int]:
    """Return the steps that torchtitan's own back end saved in a folder of a file system."""
    found = Path(folder.removeprefix("file://")).glob("step-*/.metadata")
    matches = (_DCP_DIRECTORY.fullmatch(path.parent.name) for path in found)
    return {int(match[1]) for match in matches if match is not None}


def join_place(place: str, name: str) -> str:
    """Return the place of a name below a path or URL. An absolute path or URL stays as it is."""
    if "://" in name:
        return name
    if "://" not in place:
        return os.path.join(place, name)
    path, mark, options = place.partition("?")
    return posixpath.join(path, name) + mark + options
