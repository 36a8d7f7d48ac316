"""Kill processes in the middle of their work: in a bucket of a copy, at a record they write, or at
any change that they make to the files below a directory.

    python deaths.py PATTERN WHEN agent run --dir=…

is the command line of shardwise, but dies at the first record whose name matches the pattern. With
`save.json#3` it dies at the third one. With `effect#7` it dies before the seventh change; with
`stop#7` it is stopped there for seven seconds. With `answer#3` one of three answers to it is lost.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


def stop_for_a_while() -> None:
    """Be stopped for seven seconds, longer than others bear with silence."""
    resume = f"sleep 7; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", resume], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_answers(every: int) -> None:
    """From now on, one of so many answers of other agents is lost."""
    from shardwise.kernel.errors import StoreError
    from shardwise.parts.memory.remote.client import AgentClient

    ask = AgentClient._request
    choose = random.Random(every)

    def losing(client: AgentClient, *args: Any, **kwargs: Any) -> object:
        answer = ask(client, *args, **kwargs)
        if choose.randrange(every) == 0:
            raise StoreError(f"{client}: the answer was lost")
        return answer

    AgentClient._request = losing  # type: ignore[method-assign, assignment]


def act_at_effect(number: int, home: str, act: Callable[[], None] = die) -> None:
    """From now on, die before this change of the names below a directory: a file that is renamed,
    linked or removed, or a directory that is made or removed. The first one is 1.

    Args:
        act: what to do instead.
    """
    seen = iter(range(1, number + 1))
    lock = threading.Lock()

    def dying(change: Callable[..., object]) -> Callable[..., object]:
        def change_or_die(*args: object, **kwargs: object) -> object:
            if home in str(args[0]) or home in str(args[1:2]):
                with lock:
                    is_due = next(seen, 0) == number
                if is_due:
                    act()
            return change(*args, **kwargs)

        return change_or_die

    for name in ("rename", "replace", "link", "unlink", "rmdir", "mkdir"):
        setattr(os, name, dying(getattr(os, name)))


def die_at_note(pattern: str, when: When) -> None:
    """From now on, die when a record is written whose name matches the pattern.

    Args:
        pattern: a regular expression; `#3` at its end stands for the third record that matches.
        when: "before" the record is written; "within" the write, when it is not yet in place; or
            "after" it.
    """
    from shardwise.parts.memory.files import write_record

    pattern, _, number = pattern.partition("#")
    seen = iter(range(int(number or 1)))

    def dying(path: Path, note: object) -> None:
        if not re.search(pattern, path.name) or next(seen) < int(number or 1) - 1:
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

    pattern, when = sys.argv.pop(1), sys.argv.pop(1)
    (where,) = (each.removeprefix("--dir=") for each in sys.argv if each.startswith("--dir="))
    runs, number = f"{where}/shardwise-{os.getuid()}/runs/", int(pattern.partition("#")[2] or 1)
    if pattern.startswith("effect#"):
        act_at_effect(number, runs)
    elif pattern.startswith("stop#"):
        act_at_effect(number, runs, stop_for_a_while)
    elif pattern.startswith("answer#"):
        lose_answers(number)
    else:
        die_at_note(pattern, when)  # type: ignore[arg-type]
    main()
