"""Where telemetry is stored: beside the checkpoint of a save, or in a directory of the root.

Example: the save with the id `0123456789abcdef` has the file `telemetry-0123456789abcdef.json.gz`
in the directory of its checkpoint. A restore has no directory of its own. Its telemetry is in
the directory `telemetry` of the root, as `restore-20261127T040506Z-89abcdef01234567.json.gz`.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime

from shardwise.kernel.manifest.manifest import LARGEST_TELEMETRY, telemetry_file
from shardwise.kernel.store import Store, publish_unsynced
from shardwise.parts.telemetry.encoding import decode_file, encode_file
from shardwise.parts.telemetry.records import OPERATIONS, Telemetry

DIRECTORY = "telemetry"
"""In a root: the telemetry of operations without a directory of their own."""
KEPT_FILES = 256
"""In `DIRECTORY`, the newest files stay."""

_OPERATION_FILE = re.compile(
    rf"({'|'.join(OPERATIONS)})-(\d{{8}}T\d{{6}}Z)-[0-9a-f]{{16}}\.json\.gz"
)


def write_of_save(checkpoint: Store, telemetry: Telemetry) -> None:
    """Store the telemetry of a save, whose id is `telemetry.id`.

    Raises:
        OSError: the store failed.
    """
    publish_unsynced(checkpoint, telemetry_file(telemetry.id), encode_file(telemetry))


def list_operations(root: Store) -> list[str]:
    """Return the names of the files with the telemetry of restores and snapshots, oldest first.

    Raises:
        OSError: the store failed.
    """
    names: list[str] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = root.at(DIRECTORY).list()
    matches = [match for name in names if (match := _OPERATION_FILE.fullmatch(name))]
    return [match[0] for match in sorted(matches, key=lambda match: (match[2], match[0]))]


def read_file(directory: Store, name: str) -> Telemetry | None:
    """Return the telemetry in a file; None if it is missing.

    Raises:
        FormatError: the file is damaged, or has another version.
        OSError: the store failed.
    """
    try:
        data = directory.read(name, limit=LARGEST_TELEMETRY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return decode_file(data, f"{directory}/{name}")


def write_operation(root: Store, telemetry: Telemetry, *, keep: int = KEPT_FILES) -> str:
    """Store the telemetry of a restore or a snapshot in a root, and return the file's name.

    Args:
        keep: how many files stay there, the newest ones.

    Raises:
        OSError: the store failed.
    """
    started = datetime.fromisoformat(telemetry.started)
    name = f"{telemetry.operation}-{started:%Y%m%dT%H%M%SZ}-{telemetry.id}.json.gz"
    directory = root.at(DIRECTORY)
    publish_unsynced(directory, name, encode_file(telemetry))
    for old in list_operations(root)[:-keep]:
        directory.delete(old)
    return name
