"""A gang: worker processes that stay alive, and run functions as ranks of a process group."""

from __future__ import annotations

import contextlib
import math
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

from shardwise.kernel.errors import ShardwiseError
from tests.tools.gang_worker import DISMISS, READY, STACKS_SIGNAL, Outcome, Task, serve_calls

T = TypeVar("T")

PRELOAD = ("torch", "torch.distributed.tensor.debug", "shardwise")
CLEANUP_TIMEOUT = 10.0  # seconds for a worker to clean up after a call
STACKS_TIMEOUT = 2.0  # seconds for workers that hang to write their stacks
LOOK_SECONDS = 0.5  # how often to look for progress


class GangError(ShardwiseError):
    """A function failed on some ranks.

    Attributes:
        failures: for each failed rank, a report with the traceback.
        exceptions: for each rank that raised, the exception, if it could be pickled.
    """

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if outcome.kind != "value"]
        self.failures = {outcome.rank: outcome.report for outcome in failed}
        self.exceptions = {
            outcome.rank: outcome.exception for outcome in failed if outcome.exception is not None
        }
        parts = [f"--- rank {rank} ---\n{report}" for rank, report in self.failures.items()]
        super().__init__(f"failed on {len(failed)} of {len(outcomes)} ranks\n" + "\n".join(parts))


class Patience:
    """A limit for a call, or for the time in which a call makes no progress.

    Args:
        seconds: the limit.
        progress: returns a value that changes when the call makes progress. Then the limit begins
            anew. None: the limit is for the whole call.
        longest: limit for the whole call, in seconds, with or without progress.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        seconds: float,
        progress: Callable[[], object] | None = None,
        longest: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._clock = seconds, clock
        self._progress = (lambda: None) if progress is None else progress
        self._seen = self._progress()
        now = clock()
        self._latest = now + longest
        self._end = min(now + seconds, self._latest)

    def seconds_left(self) -> float:
        """Return the seconds until the limit, 0.0 if it has passed."""
        seen = self._progress()
        now = self._clock()
        if seen != self._seen:
            self._seen = seen
            self._end = min(now + self._seconds, self._latest)
        return max(0.0, self._end - now)


class Gang:
    """Up to `size` worker processes on this machine, which are started on first use.

    Workers are forked from a server process that has already imported torch, shardwise and the
    modules in `preload`. So a new worker starts in a tenth of a second. All gangs of a process
    share the server: only the `preload` of the first gang has an effect. Use a gang as a context
    manager, and guard scripts with `if __name__ == "__main__"`.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = ()) -> None:
        if size < 1:
            raise ValueError(f"size={size}: a gang needs at least one worker")
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
            worker.end(CLEANUP_TIMEOUT if kind is None else 0.0)
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

        The workers import `function`, so it must be defined at the top level of a module. Workers
        get this process's environment, working directory and search path, and the variables that
        torchrun sets. The default process group is a gloo group of all ranks.

        Args:
            world: number of ranks; all workers if None.
            timeout: limit for the call, in seconds.
            group_timeout: limit for each communication within the call, in seconds.

        Raises:
            GangError: the function raised on some rank, or a rank died or did not return in time.
        """
        outcomes = self.run_outcomes(
            function, *args, world=world, timeout=timeout, group_timeout=group_timeout, **kwargs
        )
        if any(outcome.kind != "value" for outcome in outcomes):
            raise GangError(outcomes)
        return [outcome.value for outcome in outcomes]

    def run_outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
        patience: Patience | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Call a function as `run` does, but return the outcome of each rank instead of raising.

        The other ranks continue when one dies. Ranks that have not returned after `timeout`
        seconds, or at the limit of `patience`, are killed and count as hung.
        """
        world = self.size if world is None else world
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world}: a gang of {self.size} runs 1 to {self.size} ranks")
        pickled_call = pickle.dumps((function, args, kwargs))
        workers = self._ready_workers(world)
        with tempfile.TemporaryDirectory(prefix="shardwise-run-") as folder:
            task = Task(
                rank=0,
                world=world,
                pickled_call=pickled_call,
                rendezvous=Path(folder, "rendezvous"),
                group_timeout=group_timeout,
                environ={},
                directory=Path.cwd(),
                search_path=list(sys.path),
            )
            try:
                _send_task(workers, task)
                outcomes = _collect_outcomes(workers, patience or Patience(timeout))
                _dismiss_workers(workers)
            except BaseException:  # for example KeyboardInterrupt
                for worker in workers:
                    worker.end(0.0)
                raise
        return outcomes

    def _ready_workers(self, world: int) -> list[_Worker]:
        """Return the first `world` workers. Start missing workers, and replace dead ones."""
        if self._folder is None:
            raise RuntimeError(
                "the gang is not started: use it as a context manager, `with Gang(4) as gang: …`"
            )
        for rank in range(world):
            stacks_file = Path(self._folder.name, f"stacks-{rank}")
            if rank == len(self._workers):
                self._workers.append(_start_worker(stacks_file, self._preload))
            elif not self._workers[rank].process.is_alive():
                self._workers[rank].end(0.0)
                self._workers[rank] = _start_worker(stacks_file, self._preload)
        return self._workers[:world]


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker process, this process's end of its pipe, and the file for its stack traces."""

    process: ForkServerProcess
    pipe: Connection
    stacks_file: Path

    def send(self, message: bytes) -> None:
        """Send a message. If the worker is dead, `receive_outcome` reports it."""
        with contextlib.suppress(OSError):
            self.pipe.send_bytes(message)

    def receive_outcome(self, rank: int) -> Outcome:
        """Return the outcome that the worker sent. If the worker died, return a "died" outcome."""
        try:
            if self.pipe.poll():
                outcome: Outcome = pickle.loads(self.pipe.recv_bytes())
                return outcome
        except (EOFError, OSError):
            pass
        except Exception as error:
            report = f"the worker's outcome cannot be unpickled: {error!r}"
            return Outcome(rank=rank, kind="error", exception=error, report=report)
        self.end(1.0)
        code = self.process.exitcode
        return Outcome(rank=rank, kind="died", report=f"died (exit code {code})", exitcode=code)

    def is_ready(self) -> bool:
        """Return whether the worker reported that it is ready."""
        try:
            return self.pipe.recv_bytes() == READY
        except (EOFError, OSError):
            return False

    def ask_for_stacks(self) -> None:
        """Let the worker write the stacks of its threads."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, STACKS_SIGNAL)

    @property
    def stacks(self) -> str:
        """The stacks that the worker has written so far."""
        file = self.stacks_file
        return file.read_text(errors="replace") if file.exists() else ""

    def end(self, grace: float) -> None:
        """Wait up to `grace` seconds for the process to exit, then kill it."""
        self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def _start_worker(stacks_file: Path, preload: Sequence[str]) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    parent_end, worker_end = context.Pipe()
    process = context.Process(
        target=serve_calls, args=(worker_end, stacks_file), name=f"gang-{stacks_file.name}"
    )
    process.start()
    worker_end.close()
    return _Worker(process, parent_end, stacks_file)


def _send_task(workers: Sequence[_Worker], task: Task) -> None:
    """Send the task to each worker, with its rank and environment."""
    port = _free_port()
    for rank, worker in enumerate(workers):
        environ = {**os.environ, **_rank_variables(rank, task.world, port)}
        worker.send(pickle.dumps(replace(task, rank=rank, environ=environ)))


def _collect_outcomes(workers: Sequence[_Worker], patience: Patience) -> list[Outcome]:
    """Return the outcomes by rank. Kill workers that have not answered by the limit."""
    outcomes: dict[int, Outcome] = {}
    for rank in _indices_as_they_report(workers, patience):
        outcomes[rank] = workers[rank].receive_outcome(rank)
    hung = {rank: worker for rank, worker in enumerate(workers) if rank not in outcomes}
    stacks = _kill_hung(list(hung.values()))
    for rank, text in zip(hung, stacks, strict=True):
        report = f"did not answer in time\n{text}"
        outcomes[rank] = Outcome(rank=rank, kind="hung", report=report)
    return [outcomes[rank] for rank in range(len(workers))]


def _kill_hung(workers: Sequence[_Worker]) -> list[str]:
    """Kill workers, and return the stacks of their threads.

    All write their stacks before the first is killed. The others would react to its death, and
    their stacks would no longer show where they hung.
    """
    for worker in workers:
        worker.ask_for_stacks()
    before: list[str] = []
    stacks = [""] * len(workers)
    deadline = time.monotonic() + STACKS_TIMEOUT
    while (stacks != before or not all(stacks)) and time.monotonic() < deadline:
        time.sleep(0.1)
        before, stacks = stacks, [worker.stacks for worker in workers]
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.end(0.0)
    return stacks


def _dismiss_workers(workers: Sequence[_Worker]) -> None:
    """Let the workers leave their group and clean up. Kill workers that do not answer."""
    alive = [worker for worker in workers if worker.process.is_alive()]
    for worker in alive:
        worker.send(DISMISS)
    answered = set(_indices_as_they_report(alive, Patience(CLEANUP_TIMEOUT)))
    for index, worker in enumerate(alive):
        if index not in answered or not worker.is_ready():
            worker.end(0.0)


def _indices_as_they_report(workers: Sequence[_Worker], patience: Patience) -> Iterator[int]:
    """Yield the index of each worker when it sends a message or exits, until the limit."""
    pending = dict(enumerate(workers))
    while pending and (remaining := patience.seconds_left()) > 0:
        waitables: dict[Any, int] = {
            waitable: index
            for index, worker in pending.items()
            for waitable in (worker.pipe, worker.process.sentinel)
        }
        ready = wait(list(waitables), min(remaining, LOOK_SECONDS))
        for index in {waitables[waitable] for waitable in ready}:
            del pending[index]
            yield index


def _rank_variables(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set, for communication over loopback."""
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
