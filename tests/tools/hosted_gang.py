"""A gang whose server is in another process, with other imports than the gang of the session.

All gangs of a process fork their workers from one server. A framework that changes torch must not
be imported there, and each worker would take seconds to import it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.tools.gang import Gang, GangError

SECONDS_TO_START = 240.0


class HostedGang:
    """The gang of another process.

    Args:
        pipe: a connection to `serve` in that process.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def run(self, function: Callable[..., Any], *args: Any, timeout: float, **options: Any) -> Any:
        """Call a function on ranks, as `Gang.run` does."""
        self._pipe.send((function, args, {"timeout": timeout, **options}))
        assert self._pipe.poll(timeout + SECONDS_TO_START), "the process of the gang hangs"
        outcomes = self._pipe.recv()
        if any(outcome.kind != "value" for outcome in outcomes):
            raise GangError(outcomes)
        return [outcome.value for outcome in outcomes]


@contextmanager
def hosted_gang(size: int, preload: Sequence[str]) -> Iterator[HostedGang]:
    """Start a process with a gang, whose workers are forked after the imports in `preload`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, size, preload))
    process.start()
    theirs.close()
    try:
        yield HostedGang(ours)
    finally:
        ours.close()
        process.join(20.0)
        process.kill()


def serve(pipe: Connection, size: int, preload: Sequence[str]) -> None:
    """Run calls until the other end of the pipe is closed."""
    with Gang(size, preload=preload) as gang:
        while True:
            try:
                function, args, options = pipe.recv()
            except EOFError:
                return
            pipe.send(gang.run_outcomes(function, *args, **options))
