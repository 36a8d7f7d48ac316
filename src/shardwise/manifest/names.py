"""Names of files, keys and directories in a checkpoint."""

from __future__ import annotations

import re
import secrets

from shardwise.errors import FormatError, StateError

MANIFEST = "manifest.json"
RESERVED = "__shardwise__"
LONGEST_NAME = 4096
OBJECTS_KEY = f"{RESERVED}.objects"
CHECKSUMS_KEY = f"{RESERVED}.checksums"

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STEP = re.compile(r"step-(\d{8,18})")
_SAVE_ID = re.compile(r"[0-9a-f]{16}")


_MADE_BY_SAVE = re.compile(
    r"r\d{5,}-[0-9a-f]{16}\.safetensors|saving-[0-9a-f]{16}\.lock|\.manifest\.json\.[0-9a-f]{8}"
)


def made_by_save(name: str) -> bool:
    """Return whether a file name is one that a save makes, except for the manifest."""
    return _MADE_BY_SAVE.fullmatch(name) is not None


def new_save_id() -> str:
    """Return a new id of a save, which is part of the names of its files."""
    return secrets.token_hex(8)


def data_file(rank: int, save_id: str) -> str:
    """Return the name of a rank's data file."""
    return f"r{rank:05d}-{save_id}.safetensors"


def lock_file(save_id: str) -> str:
    """Return the name of the file that is locked while a save runs."""
    return f"saving-{save_id}.lock"


def is_lock_file(name: str) -> bool:
    """Return whether a file is the lock of a running or crashed save."""
    return name.startswith("saving-") and name.endswith(".lock")


def step_directory(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step-{step:08d}"


def step_of_directory(name: str) -> int | None:
    """Return the step of a directory; None if the name is not that of a step."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match and name == step_directory(int(match.group(1))) else None


def checked_file(name: str) -> str:
    """Return a file name from a manifest.

    Raises:
        FormatError: the name is not one plain path component.
    """
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise FormatError(f"manifest names an unsafe file {name!r}: expected one plain component")
    return name


def checked_name(name: str) -> str:
    """Return the name of a value.

    Raises:
        StateError: the name is too long, reserved, or not valid text.
    """
    if len(name) > LONGEST_NAME:
        raise StateError(f"{name[:60]}...: this name has over {LONGEST_NAME} characters")
    if name.startswith(RESERVED) or "\0" in name:
        raise StateError(f"{name!r}: names cannot contain NUL or begin with {RESERVED}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StateError(f"{name!r}: this name is not Unicode: {error}") from error
    return name


def checked_save_id(save_id: str) -> str:
    """Return a save id from a manifest.

    Raises:
        FormatError: the id is not 16 hexadecimal digits.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(f"save_id {save_id[:40]!r} is not 16 hexadecimal digits")
    return save_id
