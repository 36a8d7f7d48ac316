"""The error of a save or load that failed on some ranks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from shardwise.errors import ShardwiseError


class CheckpointError(CheckpointException, ShardwiseError):
    """A save or load failed on some ranks. All ranks raise it.

    DCP's own `CheckpointException` is no `Exception`, so `except Exception` does not catch it. This
    class is a `CheckpointException` and an `Exception`.

    Attributes:
        failures: the error of each failed rank, and its stack, as in `CheckpointException`.
    """

    def __str__(self) -> str:
        """Return the error of each rank; at most 16."""
        shown = [
            f"  rank {rank}: {type(error).__name__}: {error}"
            for rank, (error, _) in list(self.failures.items())[:16]
        ]
        ranks = "1 rank" if len(self.failures) == 1 else f"{len(self.failures)} ranks"
        return f"{self.args[0]} failed on {ranks}:\n" + "\n".join(shown)


@contextmanager
def as_checkpoint_error(operation: str) -> Iterator[None]:
    """Turn DCP's exception into a `CheckpointError`, unless a rank was interrupted or exited.

    Args:
        operation: the name of the operation, for the message.

    Raises:
        CheckpointError: the block raised a `CheckpointException`.
    """
    try:
        yield
    except CheckpointException as error:
        if not all(isinstance(each, Exception) for each, _ in error.failures.values()):
            raise
        raise CheckpointError(operation, error.failures) from error


def with_checkpoint_errors(operation: str, future: Future[Any]) -> Future[Any]:
    """Return a future with the same result, or with the error of `as_checkpoint_error`."""
    converted: Future[Any] = Future()
    converted.set_running_or_notify_cancel()

    def pass_on(done: Future[Any]) -> None:
        try:
            with as_checkpoint_error(operation):
                result = done.result()
        except BaseException as error:
            converted.set_exception(error)
        else:
            converted.set_result(result)

    future.add_done_callback(pass_on)
    return converted
