"""The only place where the names of files are spelled."""

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
    """Whether a save gives files such names, the manifest's own excepted."""
    return _MADE_BY_SAVE.fullmatch(name) is not None


def new_save_id() -> str:
    """An id that no other save has; it is part of the names of all files of a save."""
    return secrets.token_hex(8)


def data_file(rank: int, save_id: str) -> str:
    """The name of a rank's data file."""
    return f"r{rank:05d}-{save_id}.safetensors"


def lock_file(save_id: str) -> str:
    """The name of the file that is held locked while a save is under way."""
    return f"saving-{save_id}.lock"


def is_lock_file(name: str) -> bool:
    """Whether this is a lock of a save, under way or crashed."""
    return name.startswith("saving-") and name.endswith(".lock")


def step_directory(step: int) -> str:
    """The name of the directory of a step below a root."""
    return f"step-{step:08d}"


def step_of_directory(name: str) -> int | None:
    """The step that a directory holds, or None if it is no step's directory."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match and name == step_directory(int(match.group(1))) else None


def checked_file(name: str) -> str:
    """A file name out of a manifest, if it is one plain component.

    Raises:
        FormatError: it is a path, hidden, or otherwise no plain name.
    """
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise FormatError(f"manifest names an unsafe file {name!r}: expected one plain component")
    return name


def checked_name(name: str) -> str:
    """The name of a value, if a manifest can have it.

    Raises:
        StateError: it is too long, reserved, or no text.
    """
    if len(name) > LONGEST_NAME:
        raise StateError(f"{name[:60]}...: this name has over {LONGEST_NAME} characters")
    if name.startswith(RESERVED) or "\0" in name:
        raise StateError(f"{name!r}: names have no NUL, and do not begin with {RESERVED}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StateError(f"{name!r}: this name is not Unicode text: {error}") from error
    return name


def checked_save_id(save_id: str) -> str:
    """A save id out of a manifest, if it is one.

    Raises:
        FormatError: it is not 16 hexadecimal digits.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(f"save_id {save_id[:40]!r} is not 16 hexadecimal digits")
    return save_id
