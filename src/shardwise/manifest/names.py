"""Names in a checkpoint: files, directories of steps, and rules for names of tensors and values."""

from __future__ import annotations

import re
import secrets

from shardwise.errors import FormatError, StateError

MANIFEST = "manifest.json"
REMOVED = "removed.json"
MIRROR_FILE = "mirror.json"
"""In a root: where its mirror is; see `shardwise.tiers.record`."""
RESERVED = "__shardwise__"
"""Names that begin with this text are left to shardwise itself."""
LONGEST_NAME = 4096
OBJECTS_KEY = f"{RESERVED}.objects"
CHECKSUMS_KEY = f"{RESERVED}.checksums"
FROZEN = "_frozen"
"""`model._frozen.…` are values that describe the frozen tensors of `model`; see `sw.trainable`."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_STEP = re.compile(r"step-(\d{8,18})")
_SAVE_ID = re.compile(r"[0-9a-f]{16}")
_DATA_FILE = re.compile(r"r\d{5,}-([0-9a-f]{16})\.safetensors")
_FILE_OF_SAVE = re.compile(
    rf"{_DATA_FILE.pattern}(\.part)?|saving-[0-9a-f]{{16}}\.lock"
    r"|\.manifest\.json\.[0-9a-f]{8}|removed\.json"
)


def is_file_of_save(name: str) -> bool:
    """Return whether a file has a name that saves use for files other than the manifest."""
    return _FILE_OF_SAVE.fullmatch(name) is not None


def save_id_of_file(name: str) -> str | None:
    """Return the save id in the name of a data file; None for any other name."""
    match = _DATA_FILE.fullmatch(name)
    return match.group(1) if match else None


def new_save_id() -> str:
    """Return a new random id of a save, which is part of the names of its files."""
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
    """Return the step in the name of a step's directory; None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match and name == step_directory(int(match.group(1))) else None


def check_file_name(name: str) -> str:
    """Return a file name from a manifest, after checking that it is safe to open.

    Raises:
        FormatError: the name is not one plain path component.
    """
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
        raise FormatError(
            f"the file name {name!r} is not safe to open: expected letters, digits, '.', '_' and "
            "'-', without a directory"
        )
    return name


def check_name(name: str) -> str:
    """Return the name of a tensor or value, after checking that a manifest may contain it.

    Raises:
        StateError: the name is too long, reserved, or not valid text.
    """
    if len(name) > LONGEST_NAME:
        raise StateError(
            f"{name[:60]}...: this name has {len(name)} characters, but at most {LONGEST_NAME} are "
            "allowed: shorten the keys of the state"
        )
    if name.startswith(RESERVED) or "\0" in name:
        raise StateError(
            f"{name!r}: names cannot contain NUL or begin with {RESERVED}: rename the key"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise StateError(
                f"{name!r}: this name is not valid Unicode: {error}; rename the key"
            ) from error
    return name


def check_save_id(save_id: str) -> str:
    """Return the id of a save from a manifest, after checking its form.

    Raises:
        FormatError: the id is not 16 hexadecimal digits.
    """
    if not _SAVE_ID.fullmatch(save_id):
        raise FormatError(f"the save_id {save_id[:40]!r} is not 16 hexadecimal digits")
    return save_id
