"""Programs that import the drop-in in the place of torch.distributed.checkpoint."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.planner import WriteItem

import shardwise as sw
from shardwise.integrations import dcp

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
OURS = {"StorageReader", "StorageWriter", "async_save", "load", "save"}
SCRIPT = """
from shardwise.integrations.dcp import DefaultSavePlanner, state_dict
from shardwise.integrations import dcp
import torch.distributed.checkpoint.state_dict as of_torch

assert state_dict is dcp.state_dict is of_torch
assert dcp.DefaultSavePlanner is DefaultSavePlanner
"""


def test_every_name_of_torch_is_there() -> None:
    # Other tests of this process may have imported further submodules.
    listed = [(name, value) for name, value in vars(torch_dcp).items() if not name.startswith("_")]
    names = {name for name, value in listed if not isinstance(value, ModuleType)}
    assert {"CheckpointException", "DefaultSavePlanner", "FileSystemReader"} <= names
    assert {n for n in names if getattr(dcp, n) is not getattr(torch_dcp, n)} == OURS
    later = {"state_dict"}  # torch does not import it by itself, but other tests do
    assert names - later <= {*dir(dcp)}
    imported: dict[str, Any] = {}
    exec("from shardwise.integrations.dcp import *", imported)
    assert names - later <= imported.keys()
    assert imported["save"] is dcp.save
    with pytest.raises(AttributeError, match=r"integrations\.dcp' has no attribute 'saev'"):
        dcp.saev  # noqa: B018


def test_submodules_are_those_of_torch() -> None:
    """In a new process: torch does not import `state_dict` by itself."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def save_in_background(state: dict[str, Any], **arguments: Any) -> None:
    future = dcp.async_save(state, **arguments)
    assert isinstance(future, Future)
    future.result(timeout=60)


CALLS = [dcp.save, dcp.load, save_in_background]


@pytest.mark.parametrize("call", CALLS)
def test_errors_are_exceptions(call: Callable[..., object]) -> None:
    with pytest.raises(Exception, match="unknown scheme foo://") as raised:
        call({"a": torch.ones(1)}, checkpoint_id="foo://bucket/run")
    error = raised.value
    assert isinstance(error, dcp.CheckpointError)
    assert isinstance(error, sw.ShardwiseError)
    assert isinstance(error, torch_dcp.CheckpointException)
    assert {rank: type(each) for rank, (each, _) in error.failures.items()} == {0: sw.StoreError}
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_load_does_not_give_the_reason_of_an_earlier_one(tmp_path: Path) -> None:
    reader = dcp.StorageReader(tmp_path / "a")
    with pytest.raises(torch_dcp.CheckpointException):
        torch_dcp.load({"a": torch.ones(1)}, storage_reader=reader)
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a")
    with pytest.raises(dcp.CheckpointError) as raised:
        dcp.load({"b": torch.ones(1)}, storage_reader=reader)
    error, _ = raised.value.failures[0]
    assert not isinstance(error, sw.CheckpointNotFoundError)


class InterruptedPlanner(torch_dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("call", [dcp.save, save_in_background])
def test_an_interrupt_is_no_exception(call: Callable[..., object], tmp_path: Path) -> None:
    with pytest.raises(torch_dcp.CheckpointException) as raised:
        call({"a": torch.ones(1)}, checkpoint_id=tmp_path / "a", planner=InterruptedPlanner())
    assert not isinstance(raised.value, Exception)


def test_the_refusal_to_overwrite_has_the_words_of_torch(tmp_path: Path) -> None:
    state = {"a": torch.ones(1)}
    torch_dcp.save(state, checkpoint_id=tmp_path / "torch")
    dcp.save(state, checkpoint_id=tmp_path / "ours")
    writers = [
        torch_dcp.FileSystemWriter(tmp_path / "torch", overwrite=False),
        dcp.StorageWriter(tmp_path / "ours", overwrite=False),
        dcp.StorageWriter(tmp_path / "torch"),
    ]
    for writer in writers:
        with pytest.raises(torch_dcp.CheckpointException, match="Checkpoint already exists"):
            torch_dcp.save(state, storage_writer=writer)
