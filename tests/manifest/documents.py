"""Manifests as JSON documents, so that tests can write invalid ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import shardwise as sw
from shardwise.kernel.manifest.checksums import crc32
from shardwise.testing.thread_group import ThreadGroup, run_ranks

Document = dict[str, Any]
WORLD = 2


def state_of(rank: int) -> dict[str, object]:
    """Return a state that uses every feature of a manifest."""
    shared = torch.arange(6.0)
    half = torch.arange(8, dtype=torch.int16).reshape(2, 4) + 100 * rank
    return {
        "model": {"weight": shared, "tied": shared},
        "sharded": sw.Shards((4, 4), torch.int16, [(sw.Box((2 * rank, 0), (2, 4)), half)]),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 2),
        "step": 7,
    }


def save_small(place: Path) -> None:
    """Save the state from two ranks."""

    def save(group: ThreadGroup) -> None:
        sw.save(place, state_of(group.rank), step=7, group=group, metrics={"loss": 0.5})

    run_ranks(WORLD, save)


def document_of(place: Path) -> Document:
    """Return the manifest of a checkpoint without its checksum."""
    document: Document = json.loads((place / "manifest.json").read_bytes())
    del document["crc32"]
    return document


def sealed(document: object) -> bytes:
    """Return a document as a manifest with the right checksum."""
    return sealed_bytes(json.dumps(document).encode())


def sealed_bytes(text: bytes) -> bytes:
    """Return the text of a JSON object as a manifest with the right checksum."""
    body = text.rstrip()[:-1] + b",\n"
    return body + b'"crc32":%d}\n' % crc32(body)
