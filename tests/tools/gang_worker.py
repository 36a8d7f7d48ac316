"""The worker process of a gang: reads calls from a pipe, runs them, and sends their outcomes."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

DISMISS = b"dismiss"  # from the gang: the call is over on all ranks
READY = b"ready"  # from the worker: it can run the next call
STACKS_SIGNAL = signal.SIGUSR1


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a call on one rank.

    Attributes:
        rank: the rank.
        kind: "value" if the function returned, "error" if it raised, "died" if the process ended,
            "hung" if it was killed at the timeout.
        value: return value of the function.
        exception: exception that the function raised, if it could be pickled.
        report: text of the failure: the traceback of an exception, or the stacks of a rank that
            hung.
        exitcode: exit status of a process that died, or minus the signal that killed it.
    """

    rank: int
    kind: Literal["value", "error", "died", "hung"]
    value: Any = None
    exception: BaseException | None = None
    report: str = ""
    exitcode: int | None = None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that killed the rank, or None."""
        ended = self.kind == "died" and self.exitcode is not None and self.exitcode < 0
        return signal.Signals(-self.exitcode) if ended and self.exitcode is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One call on one rank, and the environment to run it in."""

    rank: int
    world: int
    pickled_call: bytes
    rendezvous: Path
    group_timeout: float
    environ: dict[str, str]
    directory: Path
    search_path: list[str]


def serve_calls(pipe: Connection, stacks_file: Path) -> None:
    """Run calls until the parent closes the pipe.

    A worker leaves its process group only after the parent has the outcomes of all ranks. So data
    that the function sent in the background can still arrive.

    Args:
        pipe: the worker's end of the pipe to the gang.
        stacks_file: the file for the stacks of all threads, which `STACKS_SIGNAL` writes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # Workers of data loaders start as in a program of a user. A process that a fork server has
    # forked would start another such server for them, which imports torch again.
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(1)
    gc.freeze()  # objects of the server's imports are never garbage
    settings = InterpreterSettings.current()
    with stacks_file.open("w", encoding="utf-8") as file:
        faulthandler.register(STACKS_SIGNAL, file)
        try:
            while True:
                task = pickle.loads(pipe.recv_bytes())
                outcome, reusable = run_task(task)
                pipe.send_bytes(pickle.dumps(outcome))
                if not reusable:
                    return
                pipe.recv_bytes()  # DISMISS
                leave_group()
                settings.restore()
                gc.collect()
                pipe.send_bytes(READY)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def run_task(task: Task) -> tuple[Outcome, bool]:
    """Run a task. Return its outcome, and whether this process can run another task.

    If the process failed to create the process group, it cannot run another task, because torch
    does not recover from this failure.
    """
    joined = False
    try:
        os.environ.clear()
        os.environ.update(task.environ)
        os.chdir(task.directory)
        sys.path[:] = task.search_path
        importlib.invalidate_caches()
        function, args, kwargs = pickle.loads(task.pickled_call)
        join_group(task)
        joined = True
        outcome = Outcome(rank=task.rank, kind="value", value=function(*args, **kwargs))
        pickle.dumps(outcome)
    except BaseException as error:
        outcome = failed_outcome(task.rank, error)
        # gloo's threads need the interpreter lock to free the tensors of the last operation. The
        # destructor of a group holds this lock, and would wait for them forever.
        time.sleep(0.1)
        # Ranks that wait for this rank then fail at once instead of at their timeout.
        leave_group()
    return outcome, joined


def join_group(task: Task) -> None:
    """Create the default process group, and wait until all ranks have created it.

    Without the wait, a rank could leave or die while others are still connecting to it.
    """
    timeout = timedelta(seconds=task.group_timeout)
    store = dist.FileStore(str(task.rendezvous), task.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=task.rank, world_size=task.world, timeout=timeout
    )
    if store.add("arrived", 1) == task.world:
        store.set("all-arrived", "yes")
    store.wait(["all-arrived"], timeout)


def failed_outcome(rank: int, error: BaseException) -> Outcome:
    """Return the outcome of a call that raised `error`."""
    report = "".join(traceback.format_exception(error))
    try:
        exception = pickle.loads(pickle.dumps(error))
    except Exception:
        exception = None
    return Outcome(rank=rank, kind="error", exception=exception, report=report)


def leave_group() -> None:
    """Destroy the process group and clear torch's caches that refer to it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        _clear_sharding_cache()


def _clear_sharding_cache() -> None:
    """Clear a cache of DTensor. Its entries refer to meshes, which refer to destroyed groups."""
    from torch.distributed.tensor import DTensor, debug

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    clear_fast_path = getattr(debug, "_clear_fast_path_sharding_prop_cache", None)
    if clear_fast_path is not None:  # torch >= 2.10
        clear_fast_path()


@dataclass(frozen=True, slots=True)
class InterpreterSettings:
    """Settings of this process that a call may change. They are restored after each call."""

    torch_rng: torch.Tensor
    python_rng: Any
    numpy_rng: Any
    dtype: torch.dtype
    sigterm: Any

    @classmethod
    def current(cls) -> InterpreterSettings:
        """Return the current settings."""
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            np.random.get_state(),
            torch.get_default_dtype(),
            signal.getsignal(signal.SIGTERM),
        )

    def restore(self) -> None:
        """Restore the settings."""
        torch.set_rng_state(self.torch_rng)
        random.setstate(self.python_rng)
        np.random.set_state(self.numpy_rng)
        torch.set_default_dtype(self.dtype)
        torch.set_num_threads(1)
        signal.signal(signal.SIGTERM, self.sigterm)
