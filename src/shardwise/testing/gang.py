"""A gang of warm processes that run functions as the ranks of a process group."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from shardwise.errors import ShardwiseError
from shardwise.testing.worker import READY, STACKS_SIGNAL, Outcome, Task, serve

T = TypeVar("T")

PRELOAD = ("torch", "torch.distributed.tensor.debug", "shardwise")
SECONDS_TO_RETURN = 10.0  # from the end of a call until a worker is ready for the next


class GangError(ShardwiseError):
    """A function failed on some ranks.

    `failures` maps these ranks to what happened there, with tracebacks; `exceptions` maps them to
    the exceptions themselves, where there was one and it could be pickled.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.kind != "value"]
        self.failures = {outcome.rank: outcome.report for outcome in failed}
        self.exceptions = {
            outcome.rank: outcome.exception for outcome in failed if outcome.exception is not None
        }
        parts = [f"--- rank {rank} ---\n{report}" for rank, report in self.failures.items()]
        super().__init__(f"failed on {len(failed)} of {len(outcomes)} rank(s)\n" + "\n".join(parts))


class Gang:
    """Up to `size` worker processes on this machine, started when they are first needed.

    A worker is forked from a server that has imported `preload` (and torch and shardwise), so one
    that dies is replaced in a tenth of a second. The server is the interpreter's own: only the
    first gang of a process chooses what it imports. Use a gang as a context manager; a script that
    does so needs the usual `if __name__ == "__main__"`.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = ()) -> None:
        if size < 1:
            raise ValueError(f"a gang needs at least one worker, not {size}")
        self.size = size
        self._preload = [*PRELOAD, *preload]
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Gang:
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-gang-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.pipe.close()
        for worker in self._workers:
            worker.end(SECONDS_TO_RETURN if kind is None else 0.0)
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        world: int | None = None,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
        **kwargs: Any,
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on ranks 0 to `world - 1`, and return the results.

        `function` is one of a module's own, that the workers import; they get this process's
        environment, directory and search path, and the variables that torchrun sets. On each rank
        the default process group is a gloo group of `world` (all workers if None). `timeout`
        bounds the call, and `group_timeout` each communication within it, both in seconds.

        Raises `GangError` if the function raises on any rank, or a rank dies or takes too long.
        """
        outcomes = self.outcomes(
            function, *args, world=world, timeout=timeout, group_timeout=group_timeout, **kwargs
        )
        if any(outcome.kind != "value" for outcome in outcomes):
            raise GangError(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """What became of the call on each rank, in their order; as `run`, but failures are told.

        A rank that dies does not end the wait for the others; those that have not answered after
        `timeout` seconds are killed, and have hung.
        """
        world = self.size if world is None else world
        if not 1 <= world <= self.size:
            raise ValueError(f"a gang of {self.size} cannot run as {world} rank(s)")
        call = pickle.dumps((function, args, kwargs))
        workers = self._ready(world)
        with tempfile.TemporaryDirectory(prefix="shardwise-run-") as folder:
            task = Task(
                rank=0,
                world=world,
                call=call,
                rendezvous=Path(folder, "rendezvous"),
                group_timeout=group_timeout,
                environ={},
                directory=Path.cwd(),
                search_path=list(sys.path),
            )
            try:
                _send(workers, task)
                outcomes = _collect(workers, time.monotonic() + timeout)
                _dismiss(workers)
            except BaseException:  # an interrupt leaves them in the middle of the call
                for worker in workers:
                    worker.end(0.0)
                raise
        return outcomes

    def _ready(self, world: int) -> list[_Worker]:
        """The first `world` workers, alive; the dead are replaced."""
        if self._folder is None:
            raise RuntimeError("use the gang as a context manager: `with Gang(4) as gang: …`")
        for rank in range(world):
            stacks = Path(self._folder.name, f"stacks-{rank}")
            if rank == len(self._workers):
                self._workers.append(_start(stacks, self._preload))
            elif not self._workers[rank].process.is_alive():
                self._workers[rank].end(0.0)
                self._workers[rank] = _start(stacks, self._preload)
        return self._workers[:world]


@dataclass(frozen=True, slots=True)
class _Worker:
    """A process of the gang, this end of its pipe, and the file its stacks are dumped to."""

    process: ForkServerProcess
    pipe: Connection
    stacks: Path

    def send(self, message: bytes) -> None:
        """Send, unless the worker is dead; that shows when its answer is waited for."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def answer(self, rank: int) -> Outcome:
        """The outcome that the worker sent, or that it died."""
        try:
            if self.pipe.poll():
                outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
                return outcome
        except (EOFError, OSError):
            pass
        except Exception as error:
            report = f"its answer cannot be read here: {error!r}"
            return Outcome(rank=rank, kind="error", exception=error, report=report)
        self.end(1.0)
        code = self.process.exitcode
        return Outcome(rank=rank, kind="died", report=f"died (exit code {code})", exitcode=code)

    def acknowledged(self) -> bool:
        """Whether what the worker sent is its word that it is ready, and not its end."""
        try:
            return self.pipe.recv_bytes() == READY
        except (EOFError, OSError):
            return False

    def hung(self, rank: int) -> Outcome:
        """Kill the worker, and tell what it was doing."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, STACKS_SIGNAL)
            self.process.join(0.2)
        self.end(0.0)
        stacks = self.stacks.read_text(errors="replace") if self.stacks.exists() else ""
        return Outcome(rank=rank, kind="hung", report=f"did not answer in time\n{stacks}")

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for the process to end, then kill it."""
        self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _start(stacks: Path, preload: Sequence[str]) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, stacks), name=f"gang-{stacks.name}")
    process.start()
    theirs.close()
    return _Worker(process, ours, stacks)


def _send(workers: Sequence[_Worker], task: Task) -> None:
    """Send each worker the task, as the one of its rank."""
    port = _free_port()
    for rank, worker in enumerate(workers):
        environ = {**os.environ, **_rank_variables(rank, task.world, port)}
        worker.send(pickle.dumps(replace(task, rank=rank, environ=environ)))


def _collect(workers: Sequence[_Worker], deadline: float) -> list[Outcome]:
    """The outcome of each worker, by rank; those that pass the deadline are killed."""
    outcomes: dict[int, Outcome] = {}
    for rank in _as_they_report(workers, deadline):
        outcomes[rank] = workers[rank].answer(rank)
    for rank, worker in enumerate(workers):
        if rank not in outcomes:
            outcomes[rank] = worker.hung(rank)
    return [outcomes[rank] for rank in range(len(workers))]


def _dismiss(workers: Sequence[_Worker]) -> None:
    """Let the workers leave their group and tidy up; one that does not return is killed."""
    alive = [worker for worker in workers if worker.process.is_alive()]
    for worker in alive:
        worker.send(READY)
    returned = set(_as_they_report(alive, time.monotonic() + SECONDS_TO_RETURN))
    for index, worker in enumerate(alive):
        if index not in returned or not worker.acknowledged():
            worker.end(0.0)


def _as_they_report(workers: Sequence[_Worker], deadline: float) -> Iterator[int]:
    """Indices of workers, as they send something or end, until all have or time is up."""
    pending = dict(enumerate(workers))
    while pending and (left := deadline - time.monotonic()) > 0:
        things: dict[Any, int] = {
            thing: index
            for index, worker in pending.items()
            for thing in (worker.pipe, worker.process.sentinel)
        }
        for index in {things[thing] for thing in wait(list(things), left)}:
            del pending[index]
            yield index


def _rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set, on one machine that talks to itself only."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
