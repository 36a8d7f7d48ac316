"""Lists what a node stores for a run. No name leads outside the directory of the node."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec

from shardwise.errors import FormatError
from shardwise.manifest.manifest import Count
from shardwise.manifest.names import MANIFEST, check_file_name, step_of_directory

PLAIN_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z"
FilesOfSteps = dict[Count, dict[Annotated[str, msgspec.Meta(pattern=PLAIN_NAME)], Count]]
"""For each step of a run, the name and size in bytes of each file."""


@contextmanager
def open_below(home: Path, *names: str, make: bool = False) -> Iterator[int]:
    """Open a directory below the home, through the directories `names`. Links are refused.

    Args:
        make: whether to create missing directories.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with ExitStack() as stack:
        fd = os.open(home, flags)
        stack.callback(os.close, fd)
        for name in names:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=fd)
            fd = os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
            stack.callback(os.close, fd)
        yield fd


def list_steps(home: Path, run: str) -> FilesOfSteps:
    """Return name and size of the regular files of each step of a run.

    Hidden files, which are being written, are left out.
    """
    found: FilesOfSteps = {}
    try:
        with open_below(home, "runs", run) as directory:
            names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return found
    for name in names:
        step = step_of_directory(name)
        if step is not None:
            with suppress(FileNotFoundError, NotADirectoryError):
                found[step] = _list_files(home, run, name)
    return found


def _list_files(home: Path, run: str, step: str) -> dict[str, int]:
    files = {}
    with open_below(home, "runs", run, step) as directory:
        for name in os.listdir(directory):
            with suppress(FileNotFoundError, FormatError):
                if name != MANIFEST:
                    check_file_name(name)
                status = os.stat(name, dir_fd=directory, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    files[name] = status.st_size
    return files
