"""`save`, `async_save` and `load` of `torch.distributed.checkpoint`, and the error of both."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from shardwise import StateError
from shardwise.integrations.dcp.reader import StorageReader
from shardwise.integrations.dcp.writer import StorageWriter
from shardwise.kernel.errors import ShardwiseError
from shardwise.ports.binding import copy_statements


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


StateDict = dict[str, Any]
CheckpointId = str | os.PathLike[str]


def save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save a state as `torch.distributed.checkpoint.save` does, in the format of shardwise.

    Example:

        from shardwise.integrations import dcp

        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id="checkpoints/3")

    Args:
        state_dict: the state; `state_dict()` of each `Stateful` in it is called.
        checkpoint_id: a directory, which need not exist, or a URL. An existing checkpoint is
            replaced, as by DCP; `StorageWriter(path, overwrite=False)` refuses it.
        storage_writer: a `StorageWriter` with further options.
        planner, process_group, no_dist: as in torch.
        use_collectives: must be True.

    Raises:
        StateError: an option has no meaning here.
        CheckpointError: the save failed on some ranks. All ranks raise it, and its `failures`
            has the errors of shardwise. Nothing is published.
    """
    writer = _writer(checkpoint_id, storage_writer, use_collectives=use_collectives)
    with as_checkpoint_error("the save"):
        metadata: Metadata = state_dict_saver.save(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_writer=writer,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    return metadata


def async_save(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Future[Any] | AsyncSaveResponse:
    """Copy a state to host memory, and save the copy in the background.

    Without `process_group`, the background save uses a new gloo group, so that its messages cannot
    mix with those of the training.

    Example:

        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id="checkpoints/3")
        ...  # training continues
        future.result()  # the checkpoint is durable

    Args:
        state_dict, checkpoint_id, storage_writer, planner, no_dist, use_collectives: as for `save`.
        process_group: the ranks. Nothing else may use this group until the save has ended.
        async_checkpointer_type: save in a thread, or in a process.
        async_stager: copies the state. By default, all tensors are copied to host memory.

    Returns:
        A future of the save; or an `AsyncSaveResponse`, if `async_stager` returns a future. If the
        save fails, the future raises what `save` raises.

    Raises:
        StateError: an option has no meaning here.
    """
    # Saves may overlap, and a writer holds the state of one save. So each save gets a copy.
    writer = copy.copy(_writer(checkpoint_id, storage_writer, use_collectives=use_collectives))
    own_group = None
    is_thread = async_checkpointer_type is AsyncCheckpointerType.THREAD
    if is_thread and process_group is None and not no_dist and dist.is_initialized():
        own_group = dist.new_group(timeout=timedelta(minutes=10), backend="gloo")
    response = state_dict_saver.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        planner=planner,
        process_group=process_group or own_group,
        async_checkpointer_type=async_checkpointer_type,
        async_stager=HostCopyStager() if async_stager is None else async_stager,
        no_dist=no_dist,
    )
    upload = response if isinstance(response, Future) else response.upload_completion
    if own_group is not None:
        upload.add_done_callback(lambda _: _destroy(own_group))
    upload = with_checkpoint_errors("the save", upload)
    if isinstance(response, Future):
        return upload
    return AsyncSaveResponse(response.staging_completion, upload)


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(AssertionError, ValueError):  # the program has destroyed all groups already
        dist.destroy_process_group(group)


class HostCopyStager(AsyncStager):
    """Copies all tensors of a state to host memory before `async_save` returns.

    Unlike torch's `DefaultStager`, it also copies states of FSDP1, which have `ShardedTensor`s.
    """

    _synchronize_after_execute = False

    def stage(self, state_dict: StateDict) -> StateDict:
        """Return a copy of the state. A tensor that the state has twice is copied once.

        Raises:
            StateError: a value cannot be copied. The message names it.
        """
        copied: StateDict = _copy_to_host(state_dict, {}, "")
        return copied

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` has made the copy."""

    def close(self) -> None:
        """Do nothing: the copy is freed after the save."""


def _copy_to_host(value: Any, copies: dict[int, torch.Tensor], name: str) -> Any:
    """Return a copy of a value; `copies` has the copy of each tensor so far, by the tensor's id."""
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            copies[id(value)] = _copy_tensor_to_host(value)
        return copies[id(value)]
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        return {key: _copy_to_host(each, copies, f"{prefix}{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _copy_to_host(each, copies, f"{prefix}{i}") for i, each in enumerate(value)
        )
    try:
        return copy.deepcopy(value)
    except Exception as error:  # deepcopy runs code of the value
        raise StateError(
            f"{name}: a {type(value).__name__} that cannot be copied: {error}: leave it out of the "
            "state, or give it state_dict() and load_state_dict()"
        ) from error


def _copy_tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, ShardedTensor):
        source = tensor.detach()
        copied = source.clone() if source.device.type == "cpu" else source.to("cpu")
        copy_statements(tensor, copied)
        return copied
    return copy.deepcopy(tensor) if tensor.device.type == "cpu" else tensor.to(device="cpu")


def load(
    state_dict: StateDict,
    *,
    checkpoint_id: CheckpointId | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """Load a checkpoint as `torch.distributed.checkpoint.load` does, from any format.

    Example:

        state = {"model": model.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id="checkpoints/3")
        model.load_state_dict(state["model"])

    Args:
        state_dict: the state to fill, in place. `load_state_dict` of each `Stateful` in it is
            called.
        checkpoint_id: a directory or URL with a checkpoint, also a foreign one, or the root of a
            run.
        storage_reader: a `StorageReader` with further options.
        planner, process_group, no_dist: as in torch.

    Raises:
        StateError: an option has no meaning here.
        CheckpointError: the load failed on some ranks. All ranks raise it, and its `failures`
            has the errors of shardwise. Why a checkpoint was refused is in the error of the rank
            that refused it; other ranks have an AssertionError of DCP.
    """
    if storage_reader is None:
        storage_reader = StorageReader(_required(checkpoint_id, "storage_reader"))
    elif not isinstance(storage_reader, StorageReader):
        raise StateError(
            f"storage_reader={storage_reader!r}: it reads another format: pass it to "
            "torch.distributed.checkpoint.load, or pass only checkpoint_id="
        )
    rank = 0 if no_dist or not dist.is_initialized() else dist.get_rank(process_group)
    with _with_refusal(storage_reader, rank), as_checkpoint_error("the load"):
        state_dict_loader.load(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )


@contextmanager
def _with_refusal(reader: StorageReader, rank: int) -> Iterator[None]:
    """Put why the reader of this rank refused its checkpoint into the error of the load.

    DCP has an AssertionError instead, which hides the reason before torch 2.11.
    """
    try:
        yield
    except CheckpointError as error:
        refusal = reader.take_refusal()
        if refusal is not None and rank in error.failures:
            error.failures[rank] = refusal, traceback.extract_tb(refusal.__traceback__)
        raise


def _writer(
    checkpoint_id: CheckpointId | None, writer: StorageWriter | None, *, use_collectives: bool
) -> StorageWriter:
    """Return the writer of a save, after checking the options."""
    if not use_collectives:
        raise StateError(
            "use_collectives=False: each rank would write a separate checkpoint, but a checkpoint "
            "of shardwise has one manifest for all ranks: leave out use_collectives="
        )
    if writer is None:
        return StorageWriter(_required(checkpoint_id, "storage_writer"))
    if not isinstance(writer, StorageWriter):
        raise StateError(
            f"storage_writer={writer!r}: it writes another format: pass it to "
            "torch.distributed.checkpoint.save, or pass only checkpoint_id="
        )
    return writer


def _required(checkpoint_id: CheckpointId | None, other: str) -> CheckpointId:
    if not checkpoint_id:
        raise StateError(
            f"checkpoint_id={checkpoint_id!r}: pass the path or URL of a checkpoint, or {other}="
        )
    return checkpoint_id
