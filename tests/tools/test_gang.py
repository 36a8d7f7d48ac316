"""The gang that other tests stand on: results, failures of every kind, and a clean next run."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.tools.gang import Gang, GangError, Patience


class UnpicklableError(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


class FailsToArrive:
    """An argument that rank 0 cannot unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (arrive, ())


def arrive() -> None:
    if os.environ["RANK"] == "0":
        raise ImportError("not here")


def whereabouts() -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    processes = {"pid": os.getpid(), "parent": os.getppid()}
    return {"rank": dist.get_rank(), "world": dist.get_world_size(), **processes} | {
        name: os.environ[name] for name in names
    }


def scaled(value: float, *, factor: float) -> float:
    return value * factor + dist.get_rank()


def summed(value: int) -> int:
    tensor = torch.tensor(value + dist.get_rank())
    dist.all_reduce(tensor)
    return int(tensor)


def raise_on(rank: int, error: Exception) -> int:
    if dist.get_rank() == rank:
        raise error
    return dist.get_rank()


def raise_unpicklable() -> None:
    raise UnpicklableError(1, 2)


def fail_while_others_communicate() -> None:
    if dist.get_rank() == 0:
        raise KeyError("lost")
    dist.all_reduce(torch.zeros(1))


def end_on(rank: int, how: str) -> int:
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
        time.sleep(60)
    return dist.get_rank()


def sleep_on(rank: int) -> int:
    if dist.get_rank() == rank:
        time.sleep(60)
    return dist.get_rank()


def sleep_for(seconds: float) -> int:
    time.sleep(seconds)
    return dist.get_rank()


def wait_for_the_end_of_rank_0() -> None:
    process = torch.tensor(os.getpid())
    dist.broadcast(process, 0)
    while dist.get_rank() == 0 or Path(f"/proc/{int(process)}/cwd").exists():
        time.sleep(0.001)
    os._exit(0)


def send_in_the_background() -> float:
    """Rank 0 returns before it has sent."""
    tensor = torch.full((1 << 20,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        threading.Timer(0.3, dist.send, (tensor, 1)).start()
    else:
        dist.recv(tensor, 0)
    return tensor.sum().item()


def big_result(megabytes: int) -> bytes:
    return bytes([dist.get_rank()]) * (megabytes << 20)


def disturb() -> None:
    os.environ["DISTURBED"] = "1"
    os.chdir("/")
    torch.manual_seed(dist.get_rank() + 123)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    random.seed(5)
    np.random.seed(5)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def settings() -> tuple[Any, ...]:
    return (
        os.environ.get("DISTURBED"),
        os.getcwd(),
        torch.rand(1).item(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        random.random(),
        np.random.random(),
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    )


def sharded_sum() -> tuple[list[float], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    total = tensor + tensor
    return total.full_tensor().tolist(), total.device_mesh is mesh


def variable(name: str) -> str | None:
    return os.environ.get(name)


def written_in(path: Path) -> str:
    (path / str(dist.get_rank())).write_text("here")
    return os.getcwd()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_reduce(gang: Gang, world: int) -> None:
    assert gang.run(summed, 10, world=world) == [10 * world + sum(range(world))] * world


def test_ranks_are_told_apart_and_environment_is_set(gang: Gang) -> None:
    results = gang.run(whereabouts, world=3)
    assert len({result.pop("pid") for result in results} - {os.getpid()}) == 3
    assert len({result.pop("parent") for result in results}) == 1
    assert results == [
        {
            "rank": rank,
            "world": 3,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "3",
            "LOCAL_WORLD_SIZE": "3",
            "MASTER_ADDR": "127.0.0.1",
        }
        for rank in range(3)
    ]


def test_arguments_and_order_of_results(gang: Gang) -> None:
    assert gang.run(scaled, 2.0, factor=3.0) == [6.0, 7.0, 8.0, 9.0]


def test_large_results(gang: Gang) -> None:
    assert gang.run(big_result, 4, world=2) == [bytes(4 << 20), b"\x01" * (4 << 20)]


def test_workers_stay_warm(gang: Gang) -> None:
    pids = [[result["pid"] for result in gang.run(whereabouts, world=2)] for _ in range(2)]
    assert pids[0] == pids[1]


def test_workers_start_processes_as_other_programs_do(gang: Gang) -> None:
    assert gang.run(multiprocessing.get_start_method, world=1) == [
        multiprocessing.get_start_method()
    ]


def test_workers_see_this_process(
    gang: Gang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SET_BY_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    assert gang.run(variable, "SET_BY_THE_TEST", world=1) == ["yes"]
    assert gang.run(written_in, tmp_path, world=2) == [str(tmp_path)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def test_an_error_carries_tracebacks(gang: Gang) -> None:
    with pytest.raises(GangError, match="failed on 1 of 3") as caught:
        gang.run(raise_on, 1, ValueError("of rank one"), world=3)
    assert list(caught.value.failures) == [1]
    assert "raise_on" in caught.value.failures[1]
    assert "of rank one" in str(caught.value)
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert gang.run(summed, 0) == [6] * 4


def test_exits_and_interrupts_are_errors(gang: Gang) -> None:
    for error in (SystemExit(3), KeyboardInterrupt()):
        outcomes = gang.run_outcomes(raise_on, 0, error, world=2)
        assert [outcome.kind for outcome in outcomes] == ["error", "value"]
        assert type(outcomes[0].exception) is type(error)


def test_an_error_that_cannot_be_pickled(gang: Gang) -> None:
    with pytest.raises(GangError) as caught:
        gang.run(raise_unpicklable, world=1)
    assert "UnpicklableError: 1 and 2" in caught.value.failures[0]
    assert caught.value.exceptions == {}


def test_a_result_that_cannot_be_pickled(gang: Gang) -> None:
    outcomes = gang.run_outcomes(threading.Lock, world=2)
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert "pickle" in outcomes[0].report


def test_a_function_that_cannot_be_sent(gang: Gang) -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match=r"pickle|local object"):
        gang.run(lambda: None, world=1)
    assert gang.run(summed, 1, world=1) == [1]


def test_arguments_that_do_not_arrive(gang: Gang) -> None:
    outcomes = gang.run_outcomes(raise_on, FailsToArrive(), None, world=2, group_timeout=1.0)
    assert [outcome.kind for outcome in outcomes] == ["error", "error"]
    assert "ImportError: not here" in outcomes[0].report
    assert gang.run(summed, 0) == [6] * 4


def test_peers_of_a_rank_that_fails_do_not_wait_for_their_time_to_be_up(gang: Gang) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(fail_while_others_communicate, group_timeout=60.0)
    assert time.monotonic() - start < 20
    assert [outcome.kind for outcome in outcomes] == ["error"] * 4
    assert isinstance(outcomes[0].exception, KeyError)
    assert gang.run(summed, 0) == [6] * 4


def test_what_a_rank_sends_arrives_after_it_has_returned(gang: Gang) -> None:
    assert gang.run(send_in_the_background, world=2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("how", "exitcode", "ended_by"),
    [("SIGKILL", -9, signal.SIGKILL), ("SIGTERM", -15, signal.SIGTERM), ("exit", 7, None)],
)
def test_a_rank_that_dies(
    gang: Gang, how: str, exitcode: int, ended_by: signal.Signals | None
) -> None:
    before = [result["pid"] for result in gang.run(whereabouts, world=3)]
    outcomes = gang.run_outcomes(end_on, 1, how, world=3)
    assert [outcome.kind for outcome in outcomes] == ["value", "died", "value"]
    assert (outcomes[1].exitcode, outcomes[1].signal) == (exitcode, ended_by)
    assert [outcomes[0].value, outcomes[2].value] == [0, 2]
    after = [result["pid"] for result in gang.run(whereabouts, world=3)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    assert gang.run(summed, 0) == [6] * 4


def test_a_dead_rank_is_an_error_of_run(gang: Gang) -> None:
    with pytest.raises(GangError, match=r"rank 0 ---\ndied \(exit code -9\)"):
        gang.run(end_on, 0, "SIGKILL", world=2)


def test_a_rank_that_hangs(gang: Gang) -> None:
    outcomes = gang.run_outcomes(sleep_on, 1, world=2, timeout=3.0)
    assert [outcome.kind for outcome in outcomes] == ["value", "hung"]
    assert "in sleep_on" in outcomes[1].report
    assert gang.run(summed, 0) == [6] * 4


def test_a_rank_that_is_stopped(gang: Gang) -> None:
    outcomes = gang.run_outcomes(end_on, 0, "SIGSTOP", world=2, timeout=3.0)
    assert [outcome.kind for outcome in outcomes] == ["hung", "value"]
    assert gang.run(summed, 0) == [6] * 4


def test_each_stack_shows_where_a_rank_hung_not_how_it_took_the_end_of_another(gang: Gang) -> None:
    outcomes = gang.run_outcomes(wait_for_the_end_of_rank_0, world=3, timeout=3.0)
    assert [outcome.kind for outcome in outcomes] == ["hung"] * 3
    for outcome in outcomes:
        assert "in wait_for_the_end_of_rank_0" in outcome.report
    assert gang.run(summed, 0) == [6] * 4


def test_a_call_that_makes_progress_does_not_hang(gang: Gang) -> None:
    patience = Patience(0.3, progress=time.monotonic)
    outcomes = gang.run_outcomes(sleep_for, 2.0, world=2, patience=patience)
    assert [outcome.value for outcome in outcomes] == [0, 1]


def test_a_call_that_makes_no_progress_any_more_hangs(gang: Gang) -> None:
    changes = iter([1, 2, 3])
    patience = Patience(1.0, progress=lambda: next(changes, None))
    outcomes = gang.run_outcomes(sleep_on, 1, world=2, patience=patience)
    assert outcomes[1].kind == "hung"
    assert next(changes, None) is None
    assert gang.run(summed, 0) == [6] * 4


def test_the_limit_begins_anew_with_progress_but_not_beyond_the_longest_time() -> None:
    now, done = 100.0, 0
    patience = Patience(10.0, lambda: done, longest=25.0, clock=lambda: now)
    now = 109.0
    assert patience.seconds_left() == 1.0
    done = 1
    assert patience.seconds_left() == 10.0
    now = 118.0
    assert patience.seconds_left() == 1.0
    done = 2
    assert patience.seconds_left() == 7.0
    now, done = 126.0, 3
    assert patience.seconds_left() == 0.0


def test_without_a_sign_of_progress_the_limit_is_for_the_whole_call() -> None:
    now = 100.0
    patience = Patience(10.0, clock=lambda: now)
    now = 109.0
    assert patience.seconds_left() == 1.0
    now = 110.0
    assert patience.seconds_left() == 0.0


def test_an_interrupt_is_not_waited_for(gang: Gang) -> None:
    start = time.monotonic()
    # Where the tests run in the background of a shell, they were told to ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            gang.run(sleep_on, 0, world=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert gang.run(summed, 0) == [6] * 4
    assert time.monotonic() - start < 20


def test_a_dead_worker_costs_little(gang: Gang) -> None:
    """The next one is forked from the same process: no new interpreter imports torch."""
    (before,) = gang.run(whereabouts, world=1)
    gang.run_outcomes(end_on, 0, "SIGKILL", world=1)
    (after,) = gang.run(whereabouts, world=1)
    assert after["pid"] != before["pid"]
    assert after["parent"] == before["parent"]


def test_a_run_leaves_nothing_behind(gang: Gang) -> None:
    before = gang.run(settings, world=2)
    gang.run(disturb, world=2)
    assert gang.run(settings, world=2) == before
    assert before[0][0] is None
    assert before[0][4] == 1


def test_sharded_tensors_do_not_get_the_mesh_of_an_earlier_run(gang: Gang) -> None:
    for _ in range(2):
        assert gang.run(sharded_sum, world=2) == [([0.0, 2.0, 4.0, 6.0], True)] * 2


def test_sizes_are_checked(gang: Gang) -> None:
    with pytest.raises(ValueError, match="world=5: a gang of 4 runs 1 to 4 ranks"):
        gang.run(summed, 0, world=5)
    with pytest.raises(ValueError, match="world=0: a gang of"):
        gang.run(summed, 0, world=0)
    with pytest.raises(ValueError, match="at least one"):
        Gang(0)


def test_a_gang_is_used_as_a_context_manager() -> None:
    with pytest.raises(RuntimeError, match="with Gang"):
        Gang(1).run(summed, 0)


def test_leaving_the_context_ends_the_workers() -> None:
    with Gang(2) as gang:
        pids = [result["pid"] for result in gang.run(whereabouts)]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
