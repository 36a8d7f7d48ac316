"""`async_save` of the drop-in for torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import shardwise as sw
from shardwise.integrations import dcp
from shardwise.integrations.dcp.names import DCP_METADATA
from tests.integrations.test_dcp import Unknown, error_in, sharded, state_of
from tests.multirank.models import build, train
from tests.multirank.test_matrix import contents
from tests.tools.gang import Gang

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save_in_background(place: str) -> None:
    """The state changes as soon as `async_save` returns, and other collectives run meanwhile."""
    warnings.simplefilter("ignore")
    state = build("fsdp2", 1)
    futures = []
    for number in range(3):
        train(state, 1)
        saved = state_of(state, flatten=False)
        torch_dcp.save(saved, checkpoint_id=f"{place}/torch-{number}")
        plain = {**saved, "plain": torch.full((4,), float(number)), "values": {"n": [number]}}
        future = dcp.async_save(plain, checkpoint_id=f"{place}/{number}")
        assert isinstance(future, Future)
        plain["plain"].fill_(-1)
        plain["values"]["n"][0] = -1
        dist.all_reduce(torch.ones(3))
        futures.append(future)
    for future in futures:
        future.result(timeout=60)


def test_async_save_saves_the_state_of_the_call(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_in_background, str(tmp_path), world=2)
    for number in range(3):
        found, expected = contents(tmp_path / str(number)), contents(tmp_path / f"torch-{number}")
        assert sw.open(tmp_path / str(number))["plain"][...].tolist() == [float(number)] * 4
        assert found["values"] == {"n": [number]}
        assert {name: found[name] for name in expected} == expected


def save_flat_parameters(place: str) -> None:
    warnings.simplefilter("ignore")
    state = build("fsdp1", 1)
    train(state)
    saved = state_of(state, flatten=False)
    torch_dcp.save(saved, checkpoint_id=f"{place}/torch")
    future = dcp.async_save(saved, checkpoint_id=f"{place}/ours")
    assert isinstance(future, Future)
    train(state)
    future.result(timeout=60)


def test_async_save_of_fsdp1(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_flat_parameters, str(tmp_path), world=2)
    found = contents(tmp_path / "ours")
    del found[DCP_METADATA]
    assert found == contents(tmp_path / "torch")


def test_async_save_with_a_stager_returns_both_futures(tmp_path: Path) -> None:
    state = {"a": {"w": torch.ones(4)}}
    stager = DefaultStager(StagingOptions(False, False, True, False))
    response = dcp.async_save(state, checkpoint_id=tmp_path / "a", async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result(timeout=60)
    state["a"]["w"].zero_()
    response.upload_completion.result(timeout=60)
    stager.close()
    assert sw.open(tmp_path / "a")["a.w"][0] == 1


def test_a_background_save_that_fails_says_so(tmp_path: Path) -> None:
    future = dcp.async_save({"a": Unknown()}, checkpoint_id=tmp_path / "a")
    assert isinstance(future, Future)
    with pytest.raises(CheckpointException) as raised:
        future.result(timeout=60)
    assert isinstance(error_in(raised), sw.StateError)
    assert not (tmp_path / "a").exists()


def save_in_process(place: str) -> None:
    warnings.simplefilter("ignore")
    response = dcp.async_save(
        sharded(5.0),
        checkpoint_id=place,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    assert isinstance(response, Future)
    response.result(timeout=100)


@pytest.mark.long
def test_async_save_in_a_process(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_in_process, str(tmp_path / "a"), world=2, timeout=120)
    assert sw.open(tmp_path / "a")["n"] == 5.0


def test_saves_with_one_writer_may_overlap(tmp_path: Path) -> None:
    writer = dcp.StorageWriter(tmp_path / "unused", step=7)
    futures = []
    for number in range(3):
        state = {"w": torch.full((1 << 20,), float(number)), "n": number}
        place = tmp_path / str(number)
        futures.append(dcp.async_save(state, checkpoint_id=place, storage_writer=writer))
    for future in futures:
        assert isinstance(future, Future)
        future.result(timeout=60)
    for number in range(3):
        saved = sw.open(tmp_path / str(number))
        assert (saved.step, saved["n"]) == (7, number)
        assert saved["w"][...].unique().tolist() == [float(number)]
