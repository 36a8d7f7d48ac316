"""A root belongs to the job that made its first step: the steps of two jobs never mix."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.parts.ranks.process_groups import connect_process_group
from tests.breadth import mostly_long
from tests.memory.test_snapshots import shm
from tests.memory_store import MemoryStore
from tests.memory_store import Server as ServerInMemory
from tests.store.servers import Server, moto, seaweedfs
from tests.tools.gang import Gang

__all__ = ["moto", "seaweedfs", "shm"]
Open = Callable[..., sw.Checkpointer]
SIZE = 6 << 20  # more than one part of an upload


def _state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((4,), value)}


def _value(root: Any, step: int) -> float:
    state = _state(-1)
    sw.load(root, state, step=step)
    return float(state["weight"][0])


@pytest.fixture(params=["files", "objects"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens Checkpointers of one root: a directory, or a store without locks."""
    server = ServerInMemory()
    root = tmp_path / "run" if request.param == "files" else MemoryStore(server, "bucket/run/")

    def open_one(**options: Any) -> sw.Checkpointer:
        return sw.Checkpointer(root, memory=None, save_at_end=False, **options)

    return open_one


@pytest.mark.parametrize("restores", [False, True])
def test_a_second_job_in_a_new_root_is_refused_at_its_first_save(
    opened: Open, restores: bool
) -> None:
    with opened(save_every=10) as first, opened(save_every=7) as second:
        if restores:
            assert first.restore(_state(0)) is second.restore(_state(0)) is None
        first.save(10, _state(10))
        for step in (7, 14):
            with pytest.raises(sw.CheckpointExistsError, match="another job saves to this root"):
                second.save(step, _state(-7))
        first.save(20, _state(20))
        assert second.steps() == [10, 20]


def test_a_job_that_begins_before_the_first_commit_takes_the_root_over(opened: Open) -> None:
    """It may be a restart: the first job has claimed the root, but it has no step yet."""
    late: list[sw.Checkpointer] = []

    def begin_another(event: sw.Event) -> None:
        if event.stage == "write" and not late:
            late.append(opened())
            late[0].save(7, _state(7))

    with opened(on_event=begin_another) as first:
        with pytest.raises(sw.CheckpointExistsError, match="another job"):
            first.save(10, _state(10))
        assert first.steps() == [7]
        late[0].save(14, _state(14))
        assert first.steps() == [7, 14]


@pytest.mark.parametrize("restores", [False, True])
def test_of_eight_jobs_that_begin_at_once_one_saves(opened: Open, restores: bool) -> None:
    jobs = [opened() for _ in range(8)]
    start = threading.Barrier(8)

    def run(job: int) -> str:
        if restores:
            jobs[job].restore(_state(0))
        start.wait()
        try:
            for step in (100 + job, 200 + job):
                jobs[job].save(step, _state(job))
        except sw.CheckpointExistsError:
            return "told"
        return "won"

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(run, range(8)))
    assert sorted(ended) == ["told"] * 7 + ["won"]
    winner = ended.index("won")
    assert jobs[0].steps() == [100 + winner, 200 + winner]


def test_a_restart_before_the_first_commit_goes_on(opened: Open) -> None:
    with opened() as crashed:
        crashed._claim.take(force=False)  # and then the job is lost
    with opened() as restarted:
        restarted.save(1, _state(1))
    with opened() as again:
        assert again.restore(_state(0)) == 1
        again.save(2, _state(2))
        assert again.steps() == [1, 2]


def test_a_job_whose_run_was_resumed_by_another_commits_nothing(opened: Open) -> None:
    with opened(save_every=10) as lost, opened(save_every=5) as resumed:
        lost.save(10, _state(10))
        assert resumed.restore(_state(0)) == 10
        lost.save(20, _state(20))  # nothing was saved by the other yet
        assert resumed.restore(_state(0)) == 20
        resumed.save(25, _state(25))
        with pytest.raises(sw.CheckpointExistsError, match="another job"):
            lost.save(30, _state(-30))
        assert lost.restore(_state(0)) == 25
        lost.save(30, _state(30))
        assert lost.steps() == [10, 20, 25, 30]


def test_a_restore_alone_disturbs_no_training(opened: Open) -> None:
    with opened() as training:
        training.save(1, _state(1))
        with opened() as evaluation:
            assert evaluation.restore(_state(0)) == 1
        training.save(2, _state(2))
        assert training.restore(_state(0)) == 2
        training.save(3, _state(3))


def test_overwrite_takes_the_root_over(opened: Open) -> None:
    with opened() as first, opened() as second:
        first.save(1, _state(1))
        second.save(2, _state(2), overwrite=True)
        second.save(3, _state(3))
        with pytest.raises(sw.CheckpointExistsError):
            first.save(4, _state(4))
        assert first.steps() == [1, 2, 3]


def test_a_step_that_another_program_has_saved_meanwhile_is_found(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, memory=None, save_at_end=False) as checkpointer:
        sw.save(tmp_path / "step-00000010", _state(10), step=10)
        with pytest.raises(sw.CheckpointExistsError, match="step 10"):
            checkpointer.save(7, _state(7))
        assert checkpointer.steps() == [10]
        assert checkpointer.restore(_state(0)) == 10
        checkpointer.save(14, _state(14))


def test_a_root_without_the_record_goes_on(tmp_path: Path) -> None:
    """As if an earlier version had saved its steps."""
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        checkpointer.save(1, _state(1))
    (tmp_path / "run.json").unlink()
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore(_state(0)) == 1
        checkpointer.save(2, _state(2))
    record = json.loads((tmp_path / "run.json").read_text())
    del record["owner"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        assert checkpointer.restore(_state(0)) == 2
        checkpointer.save(3, _state(3))
        assert checkpointer.steps() == [1, 2, 3]


def test_a_damaged_record_can_be_read_past_and_is_named_at_a_save(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, memory=None) as checkpointer:
        checkpointer.save(1, _state(1))
    (tmp_path / "run.json").write_bytes(b"\0")
    with sw.Checkpointer(tmp_path, memory=None, save_at_end=False) as checkpointer:
        assert checkpointer.restore(_state(0)) == 1
        with pytest.raises(sw.StoreError, match=r"run\.json is damaged"):
            checkpointer.save(2, _state(2))


def save_as_jobs(root: Path, shm: Path | None) -> list[str]:
    """On a rank: ranks 0 and 1 are one job, 2 and 3 another, on a node each; both begin at once."""
    rank = dist.get_rank()
    job = rank // 2
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    memory = None if shm is None else sw.Memory(dir=str(shm / f"node-{job}"), snapshot_every=1)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        connect = partial(connect_process_group, groups[job])
        patch.setattr("shardwise.checkpointer.checkpointer.connect_default_group", connect)
        checkpointer = sw.Checkpointer(root, memory=memory, save_at_end=False, save_every=2 + job)
    dist.barrier()
    for step in (2, 3, 4, 6):
        try:
            handle = checkpointer.save(step, _state(job))
            if handle is not None and handle.report.path.startswith(str(root)):
                handle.result(60)
                results.append(f"{job}: {step}")
        except sw.ShardwiseError as error:  # noqa: PERF203
            results.append(type(error).__name__)
    dist.barrier()
    checkpointer.close(wait=False)
    return results


@pytest.mark.parametrize("background", [False, True])
def test_of_two_jobs_of_two_ranks_one_saves_and_all_ranks_of_the_other_are_told(
    gang: Gang, tmp_path: Path, shm: Path, background: bool
) -> None:
    root = tmp_path / "run"
    ended = gang.run(save_as_jobs, root, shm if background else None, world=4)
    assert ended[0] == ended[1]
    assert ended[2] == ended[3]
    jobs = [ended[0], ended[2]]
    told = [set(results) == {"CheckpointExistsError"} for results in jobs]
    assert sorted(told) == [False, True], jobs
    winner = told.index(False)
    every = 2 + winner
    steps = [step for step in (2, 3, 4, 6) if step % every == 0]
    with sw.Checkpointer(root, memory=None, save_at_end=False) as checkpointer:
        assert checkpointer.steps() == steps
    assert [_value(root, step) for step in steps] == [float(winner)] * len(steps)


def _large_state(value: int) -> dict[str, Any]:
    return {"t": torch.full((SIZE,), value, dtype=torch.uint8), "value": value}


@contextmanager
def job_of_rank(url: str, shm: Path) -> Iterator[sw.Checkpointer]:
    """On a rank, which is a job on a node of its own: the Checkpointer, which closes at once."""
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    memory = sw.Memory(dir=str(shm / f"node-{dist.get_rank()}"), when_full="wait", wait=20.0)
    with pytest.MonkeyPatch.context() as patch:
        connect = partial(connect_process_group, group)
        patch.setattr("shardwise.checkpointer.checkpointer.connect_default_group", connect)
        checkpointer = sw.Checkpointer(url, memory=memory, save_at_end=False)
    yield checkpointer
    checkpointer.close(wait=False)


def _saved(checkpointer: sw.Checkpointer, *steps: int) -> list[str]:
    """Save steps in the background; return "saved" or the error for each."""
    results = []
    for step in steps:
        try:
            handle = checkpointer.save(step, _large_state(step))
            assert handle is not None
            handle.result(60)
            results.append("saved")
        except sw.ShardwiseError as error:  # noqa: PERF203
            results.append(str(error))
    return results


def save_in_a_new_bucket(url: str, shm: Path, at_once: bool) -> list[str]:
    """Both jobs find the root new. Rank 1 saves when rank 0 has saved a step, or at once."""
    job = dist.get_rank()
    with job_of_rank(url, shm) as checkpointer:
        dist.barrier()
        if job == 1 and not at_once:
            dist.barrier()
        results = _saved(checkpointer, 10 + job)
        if job == 0 and not at_once:
            dist.barrier()
        results += _saved(checkpointer, 20 + job, 30 + job)
        dist.barrier()  # the agents of both run until both have ended
    return results


def take_over_by_restoring(url: str, shm: Path) -> list[str]:
    """Rank 1 restores the first step of rank 0, as a restart does; then both go on."""
    job = dist.get_rank()
    with job_of_rank(url, shm) as checkpointer:
        state = _large_state(0)
        assert job == 1 or checkpointer.restore(state) is None
        results = [] if job == 1 else _saved(checkpointer, 10)
        dist.barrier()
        if job == 1:
            assert checkpointer.restore(state) == state["value"] == 10
        dist.barrier()
        results += _saved(checkpointer, 20 + job, 30 + job)
        dist.barrier()
    return results


def assert_only(url: str, server: Server, *steps: int) -> None:
    """A bucket has these steps, each with the bytes of its own job, and nothing else."""
    with sw.Checkpointer(url, memory=None, save_at_end=False) as checkpointer:
        assert checkpointer.steps() == [*steps]
    for step in steps:
        state = _large_state(0)
        sw.load(url, state, step=step)
        assert torch.equal(state["t"], _large_state(step)["t"])
        assert state["value"] == step
        sw.open(url, step=step).verify()
    assert {key.partition("/")[0] for key in server.keys(url)} - {"nodes", "telemetry"} == {
        "run.json",
        *(f"step-{step:08d}" for step in steps),
    }
    assert server.unfinished_uploads(url) == []


@pytest.fixture(params=["moto", pytest.param("seaweedfs", marks=pytest.mark.long)])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("at_once", mostly_long([False, True], [False]))
def test_of_two_jobs_that_save_in_the_background_to_a_new_bucket_one_is_refused(
    gang: Gang, shm: Path, server: Server, at_once: bool
) -> None:
    url = server.new_url(part_mib="5")
    ended = gang.run(save_in_a_new_bucket, url, shm, at_once, world=2, timeout=120.0)
    won = [results == ["saved"] * 3 for results in ended]
    assert sorted(won) == [False, True], ended
    winner = won.index(True)
    assert at_once or winner == 0
    for refusal in ended[1 - winner]:
        assert url.partition("?")[0] in refusal
        assert "another job saves to this root" in refusal
        assert "pass a new root to one of them" in refusal
    assert_only(url, server, 10 + winner, 20 + winner, 30 + winner)


@pytest.mark.long  # tests above take a root over that is a directory
def test_a_job_that_restores_takes_a_bucket_over_and_loses_nothing(
    gang: Gang, shm: Path, server: Server
) -> None:
    url = server.new_url(part_mib="5")
    first, second = gang.run(take_over_by_restoring, url, shm, world=2, timeout=120.0)
    assert first[0] == "saved"
    for refusal in first[1:]:
        assert url.partition("?")[0] in refusal
        assert "another job has restored" in refusal
        assert "memory=None" in refusal
    assert second == ["saved"] * 2
    assert_only(url, server, 10, 21, 31)
