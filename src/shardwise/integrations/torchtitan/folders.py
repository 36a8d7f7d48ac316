"""The folder of a run: its checkpoints, and those of torchtitan's own back end."""

from __future__ import annotations

import os
import posixpath
import re

import shardwise as sw
from shardwise.store import Store, open_store
from shardwise.store.store_url import scheme_of

_DCP_DIRECTORY = re.compile(r"step-(\d{1,15})")


def find_newest_step(folder: str) -> int | None:
    """Return the newest step of this run in storage, or None."""
    try:
        return sw.open(folder).step
    except sw.CheckpointNotFoundError:
        return None


def list_dcp_steps(folder: str) -> set[int]:
    """Return the steps that torchtitan's own back end saved in a folder."""
    store = open_store(folder)
    directories = store.stores_with(".metadata") if store.exists() else set()
    matches = map(_DCP_DIRECTORY.fullmatch, directories)
    return {int(match[1]) for match in matches if match is not None}


def place_below(place: str, name: str) -> str:
    """Return the place of a name below a path or URL. An absolute path or URL stays as it is."""
    if scheme_of(name) is not None:
        return name
    if scheme_of(place) is None:
        return os.path.join(place, name)
    path, mark, options = place.partition("?")
    return posixpath.join(path, name) + mark + options


def remove_model_directory(store: Store) -> None:
    """Remove the directory of an earlier model, in any format."""
    if store.exists():
        for name in store.list():
            store.delete(name)
        store.remove()
