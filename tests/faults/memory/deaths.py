"""Kill processes in the middle of their work: in a bucket of a copy, or at a record they write.

    python deaths.py PATTERN WHEN agent run --dir=…

is the command line of shardwise, but dies at the first record whose name matches the pattern.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from shardwise.kernel.engine.write_file import FileSource
    from shardwise.kernel.store.store import Buffer

When = Literal["before", "within", "after"]


def die() -> None:
    """Kill this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_bucket(number: int) -> None:
    """From now on, die in the middle of the copy of this bucket."""
    from shardwise.kernel.engine.write_file import FileSource

    fill = FileSource.fill
    seen = iter(range(number + 1))

    def dying(content: FileSource, low: int, high: int, out: Buffer) -> None:
        if next(seen) == number:
            half = (high - low) // 2
            fill(content, low, low + half, out[:half])
            die()
        fill(content, low, high, out)

    FileSource.fill = dying  # type: ignore[method-assign]


def die_at_note(pattern: str, when: When) -> None:
    """From now on, die when a record is written whose name matches the pattern.

    Args:
        when: "before" the record is written; "within" the write, when it is not yet in place; or
            "after" it.
    """
    from shardwise.parts.memory.files import write_record

    def dying(path: Path, note: object) -> None:
        if not re.search(pattern, path.name):
            return write_record(path, note)
        if when == "within":
            path.with_name(f".{path.name}.0badf00d").write_bytes(b'{"cut": ')
        if when == "after":
            write_record(path, note)
        return die()

    for name, module in list(sys.modules.items()):
        if name.startswith("shardwise.parts.memory.") and hasattr(module, "write_record"):
            module.write_record = dying  # type: ignore[attr-defined]


if __name__ == "__main__":
    import shardwise.parts.memory.agent.process  # noqa: F401  # so that its records are watched too
    from shardwise.parts.cli import main

    die_at_note(sys.argv.pop(1), sys.argv.pop(1))  # type: ignore[arg-type]
    main()
